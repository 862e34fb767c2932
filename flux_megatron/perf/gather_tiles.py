"""The tiles of `hopper`'s AG+GEMM, one after another: what the tile and the communication tile of
a plan are worth.

`operator_cost` knows waves of one tile and shards that arrive whole. Here each CTA takes the next
tile, waits for its rows, and multiplies. Tiles that fill no wave, or a first half that comes in
time, are worth up to 30 %.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import NamedTuple

from flux_megatron.perf.gemm import ELEMENT_BYTES
from flux_megatron.perf.hardware import Hardware
from flux_megatron.problem import Plan, Problem, Tile

# what the waves of `operator_cost` are
REFERENCE = Tile(block_m=128, block_n=256, group_m=16)
# Of the reference's rate, by columns. 128: 0.77 to 0.94 in docs/results/h200x2/first_arrival.jsonl,
# by shape, and 0.83 in the shipped plan of 2048 x 36864 x 12288 at TP 4. 192: of a GEMM alone
# (docs/results/h200/gemm_tiles.jsonl).
SHARES = {128: 0.85, 192: 0.98}


def tiles_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """When the last tile of AG+GEMM is done: of the local shard first, then those of each peer."""
    machine = _Machine(
        hardware.sms, hardware.tflops[problem.dtype], hardware.copy_latency_us, hardware.copy_gbps
    )
    return _tiles_us(problem, plan.tile, plan.comm_rows or problem.M_shard, machine)


class _Machine(NamedTuple):
    """What of the hardware counts here."""

    sms: int
    tflops: float
    copy_latency_us: float
    copy_gbps: float


@lru_cache(maxsize=4096)  # known plans are asked for with each new kind of call
def _tiles_us(problem: Problem, tile: Tile, comm_rows: int, machine: _Machine) -> float:
    rate = machine.tflops * 1e6 / machine.sms * SHARES.get(tile.block_n, 1.0)
    tile_us = 2 * tile.block_m * tile.block_n * problem.K_local / rate
    order = _rows_of_tiles(problem, tile)
    free = deque([0.0] * machine.sms)  # as all tiles take as long, the first one begun ends first
    for hops in range(problem.world_size):
        arrivals = [
            _arrival_us(problem, last, comm_rows, machine, hops)
            for last in range(tile.block_m, problem.M_shard + tile.block_m, tile.block_m)
        ]
        for row in order:
            free.append(max(free.popleft(), arrivals[row]) + tile_us)
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


def _arrival_us(problem: Problem, last: int, comm_rows: int, machine: _Machine, hops: int) -> float:
    """When a peer's rows before `last` have come: a rank pushes to one peer after another, and each
    communication tile costs its bytes and, but for those of other peers, a latency.
    """
    if hops == 0:
        return 0.0
    pushes = math.ceil(min(last, problem.M_shard) / comm_rows)
    rows = (hops - 1) * problem.M_shard + min(pushes * comm_rows, problem.M_shard)
    size_bytes = rows * problem.columns_moved * ELEMENT_BYTES[problem.dtype]
    return pushes * machine.copy_latency_us + size_bytes / machine.copy_gbps * 1e-3
