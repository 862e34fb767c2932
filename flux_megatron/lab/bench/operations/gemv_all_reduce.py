"""GEMM+AR of few rows beside mm + all-reduce, as in decoding.

First every bit of many calls is compared: new rows each time, sizes that change from call to call
and a rank that is late now and then, eager and, on GPUs, as many replays. Then every candidate of
a case runs in turn, in every round, as a graph of CALLS calls on weights that L2 does not hold. The
slowest rank of a round counts, and the median of the rounds.

The last case is the all-reduce alone: K = 16 on each rank. Without GPUs the sizes are tiny, nothing
is captured, and times mean nothing.
"""

from __future__ import annotations

import random
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
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap import low_latency
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.step import synchronize

EPOCHS = {"cuda": 200, "cpu": 12}
ROWS = (1, 4, 16, 64, 128)
SIZES = {  # N, K of the whole layer
    "llama2-70b proj": (8192, 8192), "llama2-70b fc2": (8192, 28672),
    "gpt3-175b proj": (12288, 12288), "gpt3-175b fc2": (12288, 49152),
    "llama3-8b proj": (4096, 4096), "llama3-8b fc2": (4096, 14336),
}  # fmt: skip
CALLS = 10  # in one graph
# of the rows that are verified; no half of the words sees the same ones twice in a row
VARIANTS = 7
BEYOND_L2_BYTES = 256 * 2**20
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
    scale = 256 if small else 1
    for name, (N, K) in SIZES.items():
        for M in ROWS[:2] if small else ROWS:
            yield Case(name, M, N // scale, K // scale)
    yield Case("all-reduce alone", 6, 48 if small else 6144, 16 * run.group.size())


def verify(run: Run) -> str:
    """What is wrong, or "", the same on all ranks."""
    epochs = EPOCHS[run.device.type]
    wrong = wrong_elements(run, epochs)
    run.row("gemv_ar epochs", epochs=epochs, wrong=wrong)
    said = f"{wrong} wrong elements in {epochs} epochs"
    run.say(said)
    return said if wrong else ""


def problem(M: int, N: int, K: int, run: Run) -> Problem:
    return Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", run.group.size(), device=run.device.type)


def integers(run: Run, *shape: int) -> Tensor:
    """-1, 0 and 1: every sum is exact in fp32, in any order."""
    return torch.randint(-1, 2, shape, dtype=torch.int8, device=run.device).to(torch.bfloat16)


def expected(run: Run, x: Tensor, w: Tensor) -> Tensor:
    total = (x.float() @ w.float().t()).to(x.dtype).float()
    dist.all_reduce(total, group=run.group)
    return total.to(x.dtype)


def wrong_elements(run: Run, epochs: int) -> int:
    """Wrong elements of eager calls, and of replays, over all ranks."""
    draw, late = random.Random(1), random.Random(run.group.rank())
    small = run.device.type == "cpu"
    sizes = [(1, 8192, 4096), (16, 1001, 512), (64, 4096, 1024)]
    if small:
        sizes = [(1, 40, 24), (5, 33, 16)]
    operations = []
    for M, N, K_local in sizes:
        w = integers(run, N, K_local)
        rows = [integers(run, M, K_local) for _ in range(VARIANTS)]
        default = low_latency.default_plan(problem(M, N, K_local * run.group.size(), run))
        truth = [expected(run, x, w) for x in rows]
        plans = (default, Plan("low_latency", tile=default.tile, two_phase=True))
        operations += [(w, rows, truth, plan) for plan in plans]
    wrong = torch.zeros((), dtype=torch.int64, device=run.device)

    def be_late() -> None:
        if not small and late.random() < 0.1:
            torch.cuda._sleep(int(late.uniform(0, 3e5)))

    for epoch in range(epochs):
        w, rows, truth, plan = operations[draw.randrange(len(operations))]
        be_late()
        y = ops.gemm_all_reduce(rows[epoch % VARIANTS], w, run.group, plan=plan)
        wrong += (y != truth[epoch % VARIANTS]).sum()
    for w, rows, truth, plan in [] if small else operations[:4]:
        x = rows[0].clone()
        call = partial(ops.gemm_all_reduce, x, w, run.group, plan=plan)
        call()
        replay = replayed(call)
        for epoch in range(epochs // 4):
            be_late()
            x.copy_(rows[epoch % VARIANTS])
            wrong += (replay() != truth[epoch % VARIANTS]).sum()
            if epoch % 5 == 0:  # an eager call of another size between two replays
                other, others, right, how = operations[-1]
                y = ops.gemm_all_reduce(others[1], other, run.group, plan=how)
                wrong += (y != right[1]).sum()
    synchronize()
    return int(run.slowest(wrong))


def candidates(run: Run, case: Case) -> dict[str, Call]:
    """mm alone, the baseline, ours."""

    def baseline(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w.t())
        dist.all_reduce(y, group=run.group)
        return y

    plan = low_latency.default_plan(problem(case.M, case.N, case.K, run))
    name = f"{OURS} {plan.tile.block_n}x{plan.tile.block_k}x{plan.tile.num_stages}"
    return {
        "mm alone": lambda x, w: torch.mm(x, w.t()),
        BASELINE: baseline,
        name + " two-phase" * plan.two_phase: partial(
            ops.gemm_all_reduce, group=run.group, plan=plan
        ),
    }


def turn(calls: Callable[[], None], run: Run) -> float:
    """Microseconds a call on this rank."""
    if run.device.type == "cpu":
        started = time.perf_counter()
        calls()
        return (time.perf_counter() - started) * 1e6 / CALLS
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
    K_local, on_gpu = case.K // run.group.size(), run.device.type == "cuda"
    beyond = -(-BEYOND_L2_BYTES // (2 * case.N * K_local))
    x = torch.randn(case.M, K_local, device=run.device).to(torch.bfloat16)
    ws = [
        torch.empty(case.N, K_local, dtype=torch.bfloat16, device=run.device).normal_()
        for _ in range(min(CALLS, beyond) if on_gpu else 1)
    ]
    ready: dict[str, Callable[[], None]] = {}
    for name, call in candidates(run, case).items():

        def several(call: Call = call) -> None:
            for number in range(CALLS):
                call(x, ws[number % len(ws)])

        def make(name: str = name, several: Callable[[], None] = several) -> None:
            several()
            ready[name] = replayed(several) if on_gpu else several
            ready[name]()

        if said := run.failure(make):
            ready.pop(name, None)
            run.row("gemv_ar", **sizes, candidate=name, error=said)
            run.say(f"    {name}: {said[:200]}")
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name, calls in ready.items():
            slowest = float(run.slowest(torch.tensor(turn(calls, run))))
            if number:  # the first round warms up
                times[name].append(slowest)
    synchronize()
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians[BASELINE]
    run.say(str(case))
    for name, us in medians.items():
        run.row(
            "gemv_ar", **sizes, candidate=name, us=us, times_us=times[name], speedup=base / us,
            rounds=rounds, captured=on_gpu,
        )  # fmt: skip
        run.say(f"    {name:32} {us:8.2f} us   {base / us:5.2f}x")
