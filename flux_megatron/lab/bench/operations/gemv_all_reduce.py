"""GEMM+AR of few rows beside mm + all-reduce, as in decoding.

Each case is compared first, every bit of it: eager and, on GPUs, replayed. Then every candidate is
timed in turn, as a graph of CALLS calls on weights that L2 does not hold.

The last case is the all-reduce alone: K = 16 on each rank. Without GPUs the sizes are tiny, nothing
is captured, and times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import ops
from flux_megatron.lab.bench import operations
from flux_megatron.lab.bench.candidates import replayed
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap import low_latency
from flux_megatron.problem import Pattern, Problem
from flux_megatron.tuning.timing import race

ROWS = (1, 4, 16, 64, 128)
SIZES = {  # N, K of the whole layer
    "llama2-70b proj": (8192, 8192), "llama2-70b fc2": (8192, 28672),
    "gpt3-175b proj": (12288, 12288), "gpt3-175b fc2": (12288, 49152),
    "llama3-8b proj": (4096, 4096), "llama3-8b fc2": (4096, 14336),
}  # fmt: skip
CALLS = 10  # in one graph
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


def candidates(run: Run, case: Case) -> dict[str, Call]:
    def baseline(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w.t())
        dist.all_reduce(y, group=run.group)
        return y

    sizes, ranks, device = case[1:], run.group.size(), run.device.type
    plan = low_latency.default_plan(
        Problem(Pattern.GEMM_AR, *sizes, "bfloat16", ranks, device=device)
    )
    name = f"{OURS} {plan.tile.block_n}x{plan.tile.block_k}x{plan.tile.num_stages}"
    name += " two-phase" * plan.two_phase
    ours = partial(ops.gemm_all_reduce, group=run.group, plan=plan)
    return {"mm alone": lambda x, w: torch.mm(x, w.t()), BASELINE: baseline, name: ours}


def measure(run: Run, case: Case, rounds: int) -> None:
    """A row a candidate, those that fail included. `ArithmeticError` if ours is wrong."""
    K_local, on_gpu = case.K // run.group.size(), run.device.type == "cuda"
    beyond = -(-BEYOND_L2_BYTES // (2 * case.N * K_local))
    x = torch.empty(case.M, K_local, dtype=torch.bfloat16, device=run.device)
    ws = [x.new_empty(case.N, K_local) for _ in range(min(CALLS, beyond) if on_gpu else 1)]
    calls, made = candidates(run, case), operations.generator(run)
    once = {name: partial(call, x, ws[0]) for name, call in calls.items()}
    ours = {name: call for name, call in once.items() if name.startswith(OURS)}
    renew = partial(operations.fill, made, x, ws[0])
    operations.verify(run, renew, operations.and_in_graphs(run, ours), once[BASELINE])
    for tensor in (x, *ws):
        tensor.normal_()

    def again(call: Call) -> None:
        for number in range(CALLS):
            call(x, ws[number % len(ws)])

    several: dict[str, operations.Call] = {n: partial(again, call) for n, call in calls.items()}
    if on_gpu:
        several = {name: replayed(call) for name, call in several.items()}
    found = race(several, group=run.group, device=run.device, rounds=rounds)
    sizes = {"case": case.name, "M": case.M, "N": case.N, "K": case.K}
    run.say(str(case))
    for name, said in found.failures.items():
        run.row("gemv_ar", **sizes, candidate=name, error=said)
        run.say(f"    {name}: {said[:200]}")
    us = {name: found.median_us(name) / CALLS for name in found.times_us}
    for name in us:
        run.row(
            "gemv_ar", **sizes, candidate=name, us=us[name], speedup=us[BASELINE] / us[name],
            times_us=[one / CALLS for one in found.times_us[name]], rounds=rounds, captured=on_gpu,
        )  # fmt: skip
        run.say(f"    {name:32} {us[name]:8.2f} us   {us[BASELINE] / us[name]:5.2f}x")
