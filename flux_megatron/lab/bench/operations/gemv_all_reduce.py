"""GEMM+AR of few rows beside mm + all-reduce, as in decoding.

First every bit of many calls is compared (`gemv_verification`). Then every candidate of a case runs
in turn, in every round, as a graph of CALLS calls on weights that L2 does not hold. The slowest
rank of a round counts, and the median of the rounds.

The last case is the all-reduce alone: K = 16 on each rank. Without GPUs the sizes are tiny, nothing
is captured, and times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import ops
from flux_megatron.lab.bench.candidates import replayed
from flux_megatron.lab.bench.operations.gemv_verification import problem, wrong_elements
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap import low_latency
from flux_megatron.symm.step import synchronize

EPOCHS = {"cuda": 200, "cpu": 12}
ROWS = (1, 4, 16, 64, 128)
SIZES = {  # N, K of the whole layer
    "llama2-70b proj": (8192, 8192), "llama2-70b fc2": (8192, 28672),
    "gpt3-175b proj": (12288, 12288), "gpt3-175b fc2": (12288, 49152),
    "llama3-8b proj": (4096, 4096), "llama3-8b fc2": (4096, 14336),
}  # fmt: skip
CALLS = 10  # in one graph
BEYOND_L2_BYTES = 256 * 2**20
# replayed from a graph it ends with an illegal access (torch 2.11)
EAGER = "mm + one_shot_all_reduce, eager"
BASELINE, OURS = "mm + all-reduce", "low_latency"

Call = Callable[[Tensor, Tensor], Tensor]


class Case(NamedTuple):
    name: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.name}, M = {self.M}, N = {self.N}, K = {self.K}"


def cases(run: Run) -> Iterator[Case]:
    small = run.device.type == "cpu"
    ranks = run.group.size()
    for name, (N, K) in SIZES.items():
        for M in ROWS[:2] if small else ROWS:
            yield Case(name, M, N // 256 if small else N, K // 256 if small else K)
    yield Case("all-reduce alone", 6, 48 if small else 6144, 16 * ranks)


def verify(run: Run) -> str:
    """What is wrong, or "", the same on all ranks."""
    epochs = EPOCHS[run.device.type]
    wrong = wrong_elements(run, epochs)
    run.row("gemv_ar epochs", epochs=epochs, wrong=wrong)
    said = f"{wrong} wrong elements in {epochs} epochs"
    run.say(said)
    return said if wrong else ""


def candidates(run: Run, case: Case) -> Iterator[tuple[str, Call]]:
    """What is timed, by name: mm alone, the baseline, torch's one-shot, ours."""
    yield "mm alone", lambda x, w: torch.mm(x, w.t())

    def baseline(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w.t())
        dist.all_reduce(y, group=run.group)
        return y

    yield BASELINE, baseline
    if run.device.type == "cuda":
        import torch.distributed._symmetric_memory as symmetric_memory

        summand = symmetric_memory.empty(case.M, case.N, dtype=torch.bfloat16, device=run.device)
        symmetric_memory.rendezvous(summand, run.group.group_name)

        def one_shot(x: Tensor, w: Tensor) -> Tensor:
            torch.mm(x, w.t(), out=summand)
            name = run.group.group_name
            return torch.ops.symm_mem.one_shot_all_reduce(summand, "sum", name)

        yield EAGER, one_shot
    plan = low_latency.default_plan(problem(case.M, case.N, case.K, run))
    name = f"{OURS} {plan.tile.block_n}x{plan.tile.block_k}x{plan.tile.num_stages}"
    yield (
        name + " two-phase" * plan.two_phase,
        lambda x, w: ops.gemm_all_reduce(x, w, run.group, plan=plan),
    )


def turns(run: Run, call: Call, x: Tensor, ws: list[Tensor], captures: bool) -> Callable[[], float]:
    """One turn of CALLS calls: microseconds a call on this rank."""

    def calls() -> None:
        for number in range(CALLS):
            call(x, ws[number % len(ws)])

    calls()
    if run.device.type == "cpu":
        return partial(_on_cpu, calls)
    replay = replayed(calls) if captures else calls
    replay()
    return partial(_on_gpu, replay, run)


def _on_cpu(calls: Callable[[], None]) -> float:
    started = time.perf_counter()
    calls()
    return (time.perf_counter() - started) * 1e6 / CALLS


def _on_gpu(calls: Callable[[], None], run: Run) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # the host is ahead when the ranks meet
    dist.all_reduce(torch.zeros(1, device=run.device), group=run.group)
    first.record()
    calls()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / CALLS


def measure(run: Run, case: Case, rounds: int) -> None:
    """A row a candidate, those that fail included."""
    sizes = {"case": case.name, "M": case.M, "N": case.N, "K": case.K}
    K_local = case.K // run.group.size()
    copies = max(1, min(CALLS, -(-BEYOND_L2_BYTES // (2 * case.N * K_local))))
    copies = 1 if run.device.type == "cpu" else copies
    x = torch.randn(case.M, K_local, device=run.device).to(torch.bfloat16)
    ws = [
        torch.empty(case.N, K_local, dtype=torch.bfloat16, device=run.device).normal_()
        for _ in range(copies)
    ]
    ready: dict[str, Callable[[], float]] = {}
    for name, call in candidates(run, case):

        def make(name: str = name, call: Call = call) -> None:
            ready[name] = turns(run, call, x, ws, captures=name != EAGER)

        if said := run.failure(make):
            ready.pop(name, None)
            run.row("gemv_ar", **sizes, candidate=name, error=said)
            run.say(f"    {name}: {said[:200]}")
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name, turn in ready.items():
            slowest = float(run.slowest(torch.tensor(turn())))
            if number:  # the first round warms up
                times[name].append(slowest)
    synchronize()
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians[BASELINE]
    run.say(str(case))
    for name, us in medians.items():
        run.row(
            "gemv_ar", **sizes, candidate=name, us=us, times_us=times[name], speedup=base / us,
            rounds=rounds, captured=run.device.type == "cuda" and name != EAGER,
        )  # fmt: skip
        run.say(f"    {name:32} {us:8.2f} us   {base / us:5.2f}x")
