"""How candidates are timed: interleaved, launches hidden, the slowest rank of every round counts.

Only times of one race compare: under load a GPU slows down, and the same GEMM drifts by up to 15 %
within a minute. CONTRIBUTING.md has the protocol for readers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.symm import objects, workspaces
from flux_megatron.tuning.beside import Load

Candidate = Callable[[], object]

# device-side sleeps in cycles, for a clock near 2 GHz
# 1.5 ms: all that a candidate enqueues is enqueued before it starts. Where a host needs longer the
# next turns hide twice as much: forward of a layer of experts took 841 us in one race and 1463 on
# another host (Qwen3-30B-A3B, 2 x H200, 2026-11-29, h200x2/expert_layers.jsonl).
HIDE_LAUNCH, HIDE_MOST = 3_000_000, 24_000_000
AFTER_ALIGNMENT = 200_000  # 0.1 ms: the start event and the first launch
GAP_S = 0.002  # between two candidates of a tuner's race, for the clocks to recover


@dataclass(frozen=True)
class Race:
    """What a race found, the same on every rank.

    `times_us[name]` has one value a round, the largest over the ranks. `failures[name]` says why a
    candidate has no times, and on which ranks. `outlived[name]` counts the rounds at whose end no
    all-reduce ran beside the candidate any more, on some rank: it took so much longer than alone.
    """

    times_us: dict[str, list[float]]
    failures: dict[str, str]
    outlived: dict[str, int] = field(default_factory=dict)

    def median_us(self, name: str) -> float:
        return statistics.median(self.times_us[name])


class FailedLater(RuntimeError):
    """Which candidate failed in a timed round, on which ranks and how. Times of this race are
    worth nothing: what it left behind may have ended others early.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def race(
    candidates: Mapping[str, Candidate], *, group: ProcessGroup, device: torch.device,
    rounds: int = 12, warmup: int = 3, beside: bool = False, collective: str = "all_reduce",
    gap_s: float = GAP_S, with_host: bool = False,
) -> Race:  # fmt: skip
    """Time the candidates in `rounds` rounds, each of which runs every candidate once. Their
    launches are hidden, so GPUs' time alone counts, or, `with_host`, the host's work is added.

    Collective: every rank of `group` brings the same names in the same order. A candidate that
    raises in its `warmup` calls on any rank is out on all of them; one that raises later ends the
    race by `FailedLater`, on every rank. A rank that does not come is found by the candidate's own
    time limit and by that of `group`.

    With `beside` every timed call runs beside such collectives of another communicator, which have
    started before it on every rank; `beside.NoRoom`, on every rank, if there is no memory for them.
    """
    failures = {}
    for name, call in candidates.items():
        if failure := _warm_up(call, group, device, warmup):
            failures[name] = failure
    running = {name: call for name, call in candidates.items() if name not in failures}
    if not running:
        workspaces.check()
        return Race({}, failures)
    load = None
    if beside:
        alone_us, _ = _slowest(running, group, device, 1, None, gap_s)
        load = Load(group, device, alone_us.max().item(), collective)
    times_us, outlived = _slowest(running, group, device, rounds, load, gap_s, with_host)
    workspaces.check()
    return Race(
        dict(zip(running, times_us.t().tolist(), strict=True)),
        failures,
        dict(zip(running, outlived.sum(0).int().tolist(), strict=True)) if load else {},
    )


def _slowest(
    candidates: Mapping[str, Candidate], group: ProcessGroup, device: torch.device, rounds: int,
    load: Load | None, gap_s: float, with_host: bool = False,
) -> Tensor:  # fmt: skip
    """Times in microseconds, and 1 where `load` ended first: [2, rounds, candidates], the largest
    over the ranks. A rank where a candidate fails takes its turns to the end, as the others do.
    """
    timed_us = _CudaTurns(gap_s) if device.type == "cuda" else _cpu_turn
    failed: list[tuple[int, str, str]] = []  # in which turn, who, and how
    host_us = 0.0

    def attempt(name: str, call: Candidate) -> None:
        nonlocal host_us
        began = time.perf_counter()
        try:
            call()
        except Exception as error:
            failed.append((len(turns), name, f"{type(error).__name__}: {error}"))
        host_us = (time.perf_counter() - began) * 1e6

    turns: list[tuple[float, bool]] = []
    for _ in range(rounds):
        for name, call in candidates.items():
            time_us = timed_us(partial(attempt, name, call), group, device, load)
            turns.append((time_us + with_host * host_us, load is not None and load.ended()))
            if load:
                load.wait()
    if first := [one[0] for one in objects.all_gather(failed[:1], group) if one]:
        turn, name, _ = min(first)
        said = (why for number, _, why in failed if number == turn)
        raise FailedLater(name, _of_ranks(next(said, ""), group))
    found = torch.tensor(turns, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.t().reshape(2, rounds, len(candidates))


def _warm_up(call: Candidate, group: ProcessGroup, device: torch.device, warmup: int) -> str:
    """Run the candidate; what `failure_of` says."""

    def run() -> None:
        for _ in range(warmup):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        workspaces.check()

    return failure_of(run, group)


def failure_of(step: Callable[[], object], group: ProcessGroup) -> str:
    """Take the step; "" or, on all ranks alike, which ranks failed and how. Collective: a step that
    has collectives of its own fails on all ranks, or before the first of them on all.
    """
    said = ""
    try:
        step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return _of_ranks(said, group)


def _of_ranks(said: str, group: ProcessGroup) -> str:
    """What all ranks say, or each one that says something. Collective."""
    answers = objects.all_gather(said, group)
    if len(set(answers)) == 1:
        return said
    return "; ".join(f"rank {r}: {answer}" for r, answer in enumerate(answers) if answer)


class _CudaTurns:
    """One turn after the other: microseconds on this rank."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s, self._hide = gap_s, HIDE_LAUNCH

    def __call__(
        self, call: Candidate, group: ProcessGroup, device: torch.device, load: Load | None
    ) -> float:
        token = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)  # the collectives of the turn before are done
        time.sleep(self._gap_s)
        torch.cuda._sleep(self._hide)
        dist.all_reduce(token, group=group)  # the ranks' devices start together
        torch.cuda._sleep(AFTER_ALIGNMENT)
        if load:
            load.start()
            torch.cuda._sleep(AFTER_ALIGNMENT)  # until they run on every rank
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        if start.query():  # the device was there before all was enqueued
            self._hide = min(2 * self._hide, HIDE_MOST)
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def _cpu_turn(
    call: Candidate, group: ProcessGroup, device: torch.device, load: Load | None
) -> float:
    """What a turn of `_CudaTurns` gives."""
    dist.barrier(group=group)
    if load:
        load.start()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6
