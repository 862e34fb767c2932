"""GEMM+AR of few rows in one kernel: exact, the same bits on every rank, bounded, chosen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_device
from test_gemm_ar import operands

import flux_megatron
from flux_megatron import ops, reference
from flux_megatron.problem import Plan, Tile

SMALL = Tile(16, 16, 16, num_warps=4, num_stages=2)
PLANS = {
    "one shot": Plan("low_latency", tile=SMALL),
    "two phases": Plan("low_latency", tile=SMALL, two_phase=True),
}
SIZES = [(1, 33, 20), (3, 16, 7), (16, 40, 16), (64, 1, 33)]  # M, N, K_local


def calls(rank: int, plan: Plan) -> None:
    group = dist.group.WORLD
    results = []
    for turn in range(2):
        for M, N, K_local in SIZES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                layout = ("nt", "nn")[turn]
                xs, ws, truth = operands(M, N, K_local, group.size(), dtype, layout)
                x, w = xs[rank].to(DEVICE), ws[rank].to(DEVICE)
                y = ops.gemm_all_reduce(x, w, group, layout=layout, plan=plan)
                results.append((y, truth[rank], f"{turn} {M} {N} {dtype} {layout}"))
    for y, truth, what in results:
        assert_exact(y, truth, what)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_exact(world_size, plan):
    on_device(calls, world_size, PLANS[plan])
