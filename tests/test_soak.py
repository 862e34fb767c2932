"""Back-to-back calls of random kinds and shapes with random late ranks, every result exact.

FLUX_MEGATRON_SOAK sets the number of calls; on GPUs tens of thousands take minutes:

    FLUX_MEGATRON_SOAK=10000 pytest tests/test_soak.py
"""

from __future__ import annotations

import os
import random
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from cases import Case, Operands, call, operands
from closeness import assert_exact
from ranks import DEVICE, be_late, on_device

import flux_megatron
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import workspace

CALLS = int(os.environ.get("FLUX_MEGATRON_SOAK", "30"))
# interpreted kernels take milliseconds a tile
LARGEST, N_LARGEST = (400, 300) if DEVICE == "cuda" else (40, 40)
TILES = [Tile(16, 32, 32), Tile(32, 64, 32), Tile(64, 32, 16, group_m=2)]
PLANS = [
    None,
    *[Plan("fused", comm_rows=rows, tile=tile) for rows in (0, 1, 7, 24) for tile in TILES],
    *[Plan("pipelined", comm_rows=rows) for rows in (0, 7)],
    Plan("sequential"),
]
KINDS = (
    300  # as many kinds of calls as differ; operands are kept, so that the calls are back to back
)


@lru_cache(maxsize=KINDS)
def kind(number: int, world_size: int) -> tuple[Case, Operands]:
    draw = random.Random(number)
    growth = 1 if number % 10 else 4  # now and then one for which memory must grow
    case = Case(
        draw.choice(["ag_gemm", "gemm_rs"]),
        M_shard=draw.randint(1, growth * LARGEST),
        N_local=draw.randint(1, N_LARGEST),
        K_local=draw.randint(1, 30),
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        layout=draw.choice(["nt", "nn"]),
        plan=draw.choice(PLANS),
        seed=number,
    )
    return case, operands(case, world_size)


def soak(rank: int, calls: int) -> int:
    """All ranks make the same calls in the same order; each is late when it likes."""
    group = dist.group.WORLD
    order, lateness = random.Random(0), random.Random(1 + rank)
    unchecked: list[tuple[Case, Operands, torch.Tensor]] = []
    for _ in range(calls):
        case, given = kind(order.randrange(KINDS), group.size())
        if lateness.random() < 0.2:
            be_late(lateness.uniform(0, 0.02))
        unchecked.append((case, given, call(case, given, group)))
        if len(unchecked) == 16:  # compared later, so that no comparison separates the calls
            compare(unchecked, rank)
    compare(unchecked, rank)
    return flux_megatron.report().total


def compare(unchecked: list[tuple[Case, Operands, torch.Tensor]], rank: int) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    workspace.check()
    for case, given, y in unchecked:
        assert_exact(y, given.expected[rank], str(case))
    unchecked.clear()


@pytest.mark.timeout(60 + CALLS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_random_calls_with_random_late_ranks(world_size):
    totals = on_device(soak, world_size, CALLS, limit_s=60 + CALLS)
    assert totals == [CALLS] * world_size
