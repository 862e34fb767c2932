"""GEMM+AR of few rows: exact over many epochs.

Calls with new rows each time, sizes that change from call to call and a rank that is late now and
then, eager and, on GPUs, as many replays of graphs.
"""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import ops
from flux_megatron.lab.bench.candidates import replayed
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap import low_latency
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.step import synchronize

# of the rows that are verified; no half of the words sees the same ones twice in a row
VARIANTS = 7


def problem(M: int, N: int, K: int, run: Run) -> Problem:
    return Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", run.group.size(), device=run.device.type)


def integers(run: Run, *shape: int) -> Tensor:
    """-1, 0 and 1: every sum is exact in fp32, in any order."""
    return torch.randint(-1, 2, shape, dtype=torch.int8, device=run.device).to(torch.bfloat16)


def expected(run: Run, x: Tensor, w: Tensor) -> Tensor:
    partial = (x.float() @ w.float().t()).to(x.dtype)
    partials = [torch.empty_like(partial) for _ in range(run.group.size())]
    dist.all_gather(partials, partial, group=run.group)
    return sum((one.float() for one in partials), torch.zeros_like(partial.float())).to(x.dtype)


def wrong_elements(run: Run, epochs: int) -> int:
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
