"""The tiles of `hopper`'s AG+GEMM, one after another: what the tile, the communication tile, the
parts of K and the split along K of a plan are worth.

`operator_cost` knows waves of one tile and shards that arrive whole. Here each CTA takes the next
tile or part of one, waits for its rows, and multiplies.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from flux_megatron.kernels.split_k import SplitK, is_low, is_ragged, split_k_of_gather
from flux_megatron.overlap import hopper_plans
from flux_megatron.patterns import COLUMN
from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.gemm import ELEMENT_BYTES
from flux_megatron.perf.hardware import H200, Hardware
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.tuning.tiles import area, in_groups, main_loop_us, pushed_us

# For each part of a wide tile but the first: its sum is written, read and added. 5 to 10 do as
# well. And that parts are counted and awaited, which nothing hides in the last wave (H200,
# 2026-11-23, docs/results/h200/gemm_slices.jsonl).
FIX_UP_US = 7.0
LAST_WAVE_US = 3.0
# Of the main loop of tiles of 64 rows that are cut into parts: 64 x 192 in halves took 35 us, not
# 26, at 128 x 5120 x 8192 and 256 x 2560 x 8192 (docs/results/h200/gemm_slices.jsonl).
LOW_PARTS = 1.35
_split_k = lru_cache(maxsize=1024)(split_k_of_gather)  # it counts waves for each choice


class _Machine(NamedTuple):
    """What of the hardware counts here."""

    sms: int
    tflops: float
    copy_latency_us: float
    copy_gbps: float
    memory_gbps: float


def tile_alone(M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> Tile:
    """The tile with which a GEMM alone, x [M, K] times w of N columns, ends soonest."""
    problem = Problem(COLUMN, M, N, K, str(dtype).removeprefix("torch."), 1, layout)
    plans = [Plan("hopper", tile=tile) for tile in hopper_plans.TILES]
    tile = min(plans, key=lambda plan: tiles_us(problem, plan, H200)).tile
    return hopper_plans.wide_tile(M, N, K) if tile.block_n == 256 else tile


def tiles_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """When the last tile of AG+GEMM is done."""
    machine = _Machine(
        hardware.sms, hardware.tflops[problem.dtype], hardware.copy_latency_us, hardware.copy_gbps,
        hardware.memory_gbps,
    )  # fmt: skip
    comm_rows = plan.comm_rows or problem.M_shard
    return _tiles_us(problem, plan.tile, comm_rows, plan.split_k_shards, machine, plan.splits or 1)


@lru_cache(maxsize=4096)  # known plans are asked for with each new kind of call
def _tiles_us(
    problem: Problem, tile: Tile, comm_rows: int, split_k_shards: int, machine: _Machine,
    k_parts: int,
) -> float:  # fmt: skip
    rows = math.ceil(problem.M_shard / tile.block_m)
    columns = math.ceil(problem.N_local / tile.block_n)
    k_tiles = math.ceil(problem.K_local / tile.block_k)
    ragged = is_ragged(problem.M_shard, problem.world_size, tile)
    split = _split_k(
        rows * columns, problem.world_size, split_k_shards, k_tiles, machine.sms, ragged,
        is_low(tile),
    )  # fmt: skip
    arrivals = [
        _arrivals_us(problem, (row + 1) * tile.block_m, comm_rows, machine, hops, k_parts)
        for hops in range(problem.world_size)
        for row in range(rows)
    ]
    loop_us = main_loop_us(problem, tile, machine.sms, machine.tflops)
    part_us = loop_us, loop_us * (LOW_PARTS if is_low(tile) else 1)
    around_us, fix_up_us = area(tile) * FITTED.tile_us, area(tile) * FIX_UP_US
    if k_parts > 1:
        order = _order_of_all_rows(rows * problem.world_size, columns, tile.group_m)
    else:
        head = _head(rows, columns, problem.world_size, split)
        order = _order(rows, columns, tile.group_m, problem.world_size, head)
    free = [0.0] * split.ctas  # a heap
    for place, (row, parts) in enumerate(zip(order, _parts(split), strict=True)):
        first_us, last_us = arrivals[row]
        for _ in range(parts):
            multiplied_us = part_us[parts > 1] / parts
            end = max(free[0], first_us) + multiplied_us
            end = max(end, last_us + multiplied_us / k_parts) + around_us
            heapq.heapreplace(free, end)
        if parts > 1:  # one CTA adds them up when the last is done
            free.remove(end)
            counted_us = LAST_WAVE_US * (place >= split.tiles - split.last_wave)
            free.append(end + (parts - 1) * fix_up_us + counted_us)
            heapq.heapify(free)
    # of few rows a GEMM is bound by its weight's way from memory; near both bounds it is slower
    M, N, K = problem.M, problem.N_local, problem.K_local
    size_bytes = (M * K + N * K + M * N) * ELEMENT_BYTES[problem.dtype]
    memory_us = size_bytes / machine.memory_gbps * 1e-3
    return (max(free) ** 6 + memory_us**6) ** (1 / 6)


def _parts(split: SplitK) -> list[int]:
    """Of each tile, in the order of tiles."""
    before = split.early_last - split.early
    whole = split.tiles - split.early_last - split.last_wave
    return (
        [1] * before
        + [split.early_parts] * split.early
        + [1] * whole
        + [split.last_parts] * split.last_wave
    )


def _head(rows: int, columns: int, world_size: int, split: SplitK) -> int:
    """Columns of rank+1 that are made alone, by CTAs that find no local tile."""
    if world_size == 1 or rows > 2 or split.early_last:
        return 0
    return min(math.ceil(-rows * columns % split.ctas / rows), columns)


@lru_cache(maxsize=256)
def _order(rows: int, columns: int, group_m: int, world_size: int, head: int) -> list[int]:
    """The row of tiles of each tile, counted from the local shard's first, in the kernel's order:
    local ones, those of the `head`, then down in groups of rows, which span the remote shards.
    """
    remote = rows * (world_size - 1)
    local = [row for row, _ in in_groups(rows, columns, group_m)]
    next_rank = [rows + row for _ in range(head) for row in range(rows)]
    behind = [2 * rows + row for _ in range(head) for row in range(remote - rows)]
    others = [rows + row for row, _ in in_groups(remote, columns - head, group_m)]
    return local + next_rank + behind + others


@lru_cache(maxsize=256)
def _order_of_all_rows(rows: int, columns: int, group_m: int) -> list[int]:
    """The same where rows come in parts of K: down through all shards."""
    return [row for row, _ in in_groups(rows, columns, group_m)]


def _arrivals_us(
    problem: Problem, last: int, comm_rows: int, machine: _Machine, hops: int, k_parts: int
) -> tuple[float, float]:
    """When the first of a peer's rows before `last` have come that a tile can begin with, and the
    last: of parts of K every rank gets the first before any gets the second.
    """
    if k_parts == 1 or hops == 0:
        all_us = _arrival_us(problem, last, comm_rows, machine, hops)
        return all_us, all_us
    part_bytes = problem.M_shard * problem.columns_moved * ELEMENT_BYTES[problem.dtype] / k_parts
    first, others = hops, (k_parts - 1) * (problem.world_size - 1)
    first_us, last_us = (
        pushed_us(pushes, machine.copy_latency_us) + pushes * part_bytes / machine.copy_gbps * 1e-3
        for pushes in (first, first + others)
    )
    return first_us, last_us


def _arrival_us(problem: Problem, last: int, comm_rows: int, machine: _Machine, hops: int) -> float:
    """When a peer's rows before `last` have come: a rank pushes to one peer after another."""
    if hops == 0:
        return 0.0
    pushes = math.ceil(min(last, problem.M_shard) / comm_rows)
    rows = (hops - 1) * problem.M_shard + min(pushes * comm_rows, problem.M_shard)
    before = (hops - 1) * math.ceil(problem.M_shard / comm_rows)
    size_bytes = rows * problem.columns_moved * ELEMENT_BYTES[problem.dtype]
    latency_us = pushed_us(before + pushes, machine.copy_latency_us)
    return latency_us + size_bytes / machine.copy_gbps * 1e-3
