"""GEMM+AR of few rows: exact over many epochs, then timed beside mm + all-reduce.

    torchrun --nproc-per-node 2 tests/gpu/gemv_ar.py --out rows.jsonl --commit $(git rev-parse HEAD)
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/gemv_ar.py --device cpu

First `--epochs` eager calls and, on GPUs, as many replays of graphs, with new rows each time, sizes
that change from call to call and a rank that is late now and then: any wrong bit ends the run with
exit code 1. Then every candidate of a case runs in turn, in every round, as a graph of CALLS calls
on weights that L2 does not hold. The slowest rank of a round counts, and the median of the rounds.

The last case is the all-reduce alone: K = 16. Without GPUs the sizes are tiny, nothing is captured,
and times mean nothing. After `--limit-s` the process ends by itself, with exit code 3.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gpu_run
import torch
import torch.distributed as dist
from gpu_run import Run
from torch import Tensor

import flux_megatron
from flux_megatron import ops
from flux_megatron.overlap import low_latency
from flux_megatron.problem import Pattern, Plan, Problem

ROWS = (1, 4, 16, 64)
SIZES = {  # N, K of the whole layer
    "llama2-70b proj": (8192, 8192), "llama2-70b fc2": (8192, 28672),
    "gpt3-175b proj": (12288, 12288), "gpt3-175b fc2": (12288, 49152),
}  # fmt: skip
CALLS = 10  # in one graph
BEYOND_L2_BYTES = 256 * 2**20
# replayed from a graph it ends with an illegal access (torch 2.11)
EAGER = "mm + one_shot_all_reduce, eager"
VARIANTS = (
    7  # of the rows that are verified; no half of the words sees the same ones twice in a row
)

Call = Callable[[Tensor, Tensor], Tensor]


class Case(NamedTuple):
    name: str
    M: int
    N: int
    K: int

    def problem(self, run: Run) -> Problem:
        return Problem(
            Pattern.GEMM_AR, self.M, self.N, self.K, "bfloat16", run.group.size(),
            device=run.device.type,
        )  # fmt: skip


def cases(run: Run) -> Iterator[Case]:
    small = run.device.type == "cpu"
    ranks = run.group.size()
    for name, (N, K) in SIZES.items():
        for M in ROWS[:2] if small else ROWS:
            yield Case(name, M, N // 256 if small else N, K // 256 if small else K)
    yield Case("all-reduce alone", 6, 48 if small else 6144, 16 * ranks)


def integers(run: Run, *shape: int) -> Tensor:
    """-1, 0 and 1: every sum is exact in fp32, in any order."""
    return torch.randint(-1, 2, shape, dtype=torch.int8, device=run.device).to(torch.bfloat16)


def expected(run: Run, x: Tensor, w: Tensor) -> Tensor:
    partial = (x.float() @ w.float().t()).to(x.dtype)
    partials = [torch.empty_like(partial) for _ in range(run.group.size())]
    dist.all_gather(partials, partial, group=run.group)
    return sum((one.float() for one in partials), torch.zeros_like(partial.float())).to(x.dtype)


def verify(run: Run, epochs: int) -> int:
    """Wrong elements of eager calls, and of replays, over all ranks."""
    draw, late = random.Random(1), random.Random(run.group.rank())
    small = run.device.type == "cpu"
    sizes = (
        ((1, 40, 24), (5, 33, 16))
        if small
        else ((1, 8192, 4096), (16, 1001, 512), (64, 4096, 1024))
    )
    operations = []
    for M, N, K_local in sizes:
        w = integers(run, N, K_local)
        rows = [integers(run, M, K_local) for _ in range(VARIANTS)]
        problem = Case("", M, N, K_local * run.group.size()).problem(run)
        default = low_latency.default_plan(problem)
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
        graph = captured(
            lambda x=x, w=w, plan=plan: ops.gemm_all_reduce(x, w, run.group, plan=plan)
        )
        for epoch in range(epochs // 4):
            be_late()
            x.copy_(rows[epoch % VARIANTS])
            graph.replay()
            wrong += (graph.result != truth[epoch % VARIANTS]).sum()
            if epoch % 5 == 0:  # an eager call of another size between two replays
                other, others, right, how = operations[-1]
                y = ops.gemm_all_reduce(others[1], other, run.group, plan=how)
                wrong += (y != right[1]).sum()
    flux_megatron.synchronize()
    return int(run.slowest(wrong))


class captured:
    """A graph of `call`, which has been made before, and its result."""

    def __init__(self, call: Callable[[], object]) -> None:
        call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = call()
        torch.cuda.synchronize()

    def replay(self) -> None:
        self.graph.replay()


def candidates(run: Run, case: Case, variants: bool) -> Iterator[tuple[str, Call]]:
    """What is timed, by name: mm alone, the baseline, torch's one-shot, ours."""
    yield "mm alone", lambda x, w: torch.mm(x, w.t())

    def baseline(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w.t())
        dist.all_reduce(y, group=run.group)
        return y

    yield "mm + all-reduce", baseline
    if run.device.type == "cuda":
        import torch.distributed._symmetric_memory as symmetric_memory

        partial = symmetric_memory.empty(case.M, case.N, dtype=torch.bfloat16, device=run.device)
        symmetric_memory.rendezvous(partial, run.group.group_name)

        def one_shot(x: Tensor, w: Tensor) -> Tensor:
            torch.mm(x, w.t(), out=partial)
            name = run.group.group_name
            return torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", name)

        yield EAGER, one_shot
    plans = low_latency.candidates(case.problem(run)) if variants else []
    for plan in dict.fromkeys((low_latency.default_plan(case.problem(run)), *plans)):
        tile = plan.tile
        name = f"low_latency {tile.block_n}x{tile.block_k}x{tile.num_stages}"
        yield (
            name + " two-phase" * plan.two_phase,
            lambda x, w, plan=plan: ops.gemm_all_reduce(x, w, run.group, plan=plan),
        )


def turns(
    run: Run, call: Call, xs: Tensor, ws: list[Tensor], captures: bool
) -> Callable[[], float]:
    """One turn of CALLS calls: microseconds a call on this rank."""

    def calls() -> None:
        for number in range(CALLS):
            call(xs, ws[number % len(ws)])

    if run.device.type == "cpu":

        def turn() -> float:
            started = time.perf_counter()
            calls()
            return (time.perf_counter() - started) * 1e6 / CALLS

        return turn
    replay = captured(calls).replay if captures else calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def turn() -> float:
        torch.cuda._sleep(200_000)  # the host is ahead when the ranks meet
        dist.all_reduce(torch.zeros(1, device=run.device), group=run.group)
        first.record()
        replay()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e3 / CALLS

    return turn


def measure(run: Run, case: Case, rounds: int, variants: bool) -> None:
    K_local = case.K // run.group.size()
    copies = max(1, min(CALLS, -(-BEYOND_L2_BYTES // (2 * case.N * K_local))))
    copies = 1 if run.device.type == "cpu" else copies
    x = torch.randn(case.M, K_local, device=run.device).to(torch.bfloat16)
    ws = [
        torch.empty(case.N, K_local, dtype=torch.bfloat16, device=run.device).normal_()
        for _ in range(copies)
    ]
    ready: dict[str, Callable[[], float]] = {}
    for name, call in candidates(run, case, variants):
        made: list[Callable[[], float]] = []
        said = run.failure(
            lambda call=call, made=made, captures=name != EAGER: made.append(
                turns(run, call, x, ws, captures)
            )
        )
        if said:
            run.row(
                "gemv_ar", case=case.name, M=case.M, N=case.N, K=case.K, candidate=name, error=said
            )
            run.say(f"    {name}: {said[:200]}")
        else:
            ready[name] = made[0]
    times: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name, turn in ready.items():
            slowest = float(run.slowest(torch.tensor(turn())))
            if number:  # the first round warms up
                times[name].append(slowest)
    flux_megatron.synchronize()
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians["mm + all-reduce"]
    run.say(f"{case.name}, M = {case.M}, N = {case.N}, K = {case.K}")
    for name, us in medians.items():
        run.row(
            "gemv_ar", case=case.name, M=case.M, N=case.N, K=case.K, candidate=name, us=us,
            speedup=base / us, rounds=rounds, captured=run.device.type == "cuda" and name != EAGER,
        )  # fmt: skip
        run.say(f"    {name:32} {us:8.2f} us   {base / us:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=115)
    parser.add_argument("--variants", action="store_true", help="time other tiles too")
    parser.add_argument("--only", default="", help="cases whose name has this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is seen: --device cpu rehearses")
    watchdog = threading.Timer(options.limit_s, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    run = gpu_run.start(options.out, options.commit, options.limit_s - 15)
    epochs = options.epochs if options.device == "cuda" else 12
    wrong = verify(run, epochs)
    run.row("gemv_ar epochs", epochs=epochs, wrong=wrong)
    run.say(f"{wrong} wrong elements in {epochs} epochs, eager and captured")
    if wrong:
        gpu_run.finish(run, 1)
    for case in cases(run):
        if options.only in case.name and run.time_left():
            measure(run, case, options.rounds if options.device == "cuda" else 2, options.variants)
    gpu_run.finish(run)


if __name__ == "__main__":
    main()
