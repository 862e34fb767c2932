"""The tiles of `hopper`'s AG+GEMM, one after another: what the tile and the communication tile of
a plan are worth.

`operator_cost` knows waves of one tile and shards that arrive whole. Here each CTA takes the next
tile, waits for its rows, and multiplies. Tiles that fill no wave, or a first half that comes in
time, are worth up to 30 %.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from flux_megatron.perf.gemm import ELEMENT_BYTES
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Plan, Problem, Tile

# what the waves of `operator_cost` are
REFERENCE = Tile(block_m=128, block_n=256, group_m=16)
# Of the reference's rate: 0.77 to 0.94 in docs/results/h200x2/first_arrival.jsonl, by shape, and
# 0.83 in the shipped plan of 2048 x 36864 x 12288 at TP 4.
NARROW_SHARE = 0.85


def plan_us(problem: Problem, plan: Plan, hardware: Hardware, connections: str = "1") -> float:
    """`predict_us`, and by how much this plan's tiles take longer than the reference's."""
    predicted = predict_us(problem, plan, hardware, connections=connections)
    if plan.strategy != "hopper" or not problem.spec.gathers or plan.split_k_shards:
        return predicted
    reference = replace(plan, tile=REFERENCE, comm_rows=0)
    longer = tiles_us(problem, plan, hardware) - tiles_us(problem, reference, hardware)
    return predicted + longer


def tiles_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """When the last tile of AG+GEMM is done: of the local shard first, then those of each peer."""
    tile = plan.tile
    rate = hardware.tflops[problem.dtype] * 1e6 / hardware.sms
    if tile.block_n < REFERENCE.block_n:
        rate *= NARROW_SHARE
    tile_us = 2 * tile.block_m * tile.block_n * problem.K_local / rate
    free = deque([0.0] * hardware.sms)  # as all tiles take as long, the first one begun ends first
    for hops in range(problem.world_size):
        for row in _rows_of_tiles(problem, tile):
            arrival = _arrival_us(problem, plan, hardware, hops, row)
            free.append(max(free.popleft(), arrival) + tile_us)
    return free[-1]


def _rows_of_tiles(problem: Problem, tile: Tile) -> list[int]:
    """The row of tiles of each tile of a shard, in the kernel's order: down in groups of rows."""
    rows = math.ceil(problem.M_shard / tile.block_m)
    columns = math.ceil(problem.N_local / tile.block_n)
    return [
        row
        for first in range(0, rows, tile.group_m)
        for _ in range(columns)
        for row in range(first, min(first + tile.group_m, rows))
    ]


def _arrival_us(problem: Problem, plan: Plan, hardware: Hardware, hops: int, row: int) -> float:
    """When the rows of a row of tiles have come: a rank pushes to one peer after another, and each
    communication tile costs its bytes and, but for those of other peers, a latency.
    """
    if hops == 0:
        return 0.0
    comm_rows = plan.comm_rows or problem.M_shard
    pushes = math.ceil(min((row + 1) * plan.tile.block_m, problem.M_shard) / comm_rows)
    rows = (hops - 1) * problem.M_shard + min(pushes * comm_rows, problem.M_shard)
    size_bytes = rows * problem.columns_moved * ELEMENT_BYTES[problem.dtype]
    return pushes * hardware.copy_latency_us + size_bytes / hardware.copy_gbps * 1e-3
