"""The first plan of `hopper`, and those that the tuner tries: tiles, pushes of results
(`hopper_pushes`), and rows in parts of K.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flux_megatron.kernels.hopper.config import (
    LOW,
    NARROW,
    SLICE_COLUMNS,
    TILE,
    slice_buffers,
    wide_tile,
)
from flux_megatron.kernels.hopper.split_tiles import PART_K_TILES, split_last_wave
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.overlap.hopper_pushes import BY_SM, Push, chosen, of_sums, others
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem, Tile

# Groups of 12 rows of NARROW tiles are as high as a wave is wide, and read least. With a split
# accumulator they take .95 to .99 of the time of groups of 16 where K is 12288 or more (nine
# shapes), .99 and 1.00 at 8192, 1.00 and 1.01 below (two each; 2 x H200, 2026-11-28,
# h200x2/pushes.jsonl).
SQUARE_GROUP, SQUARE_K = 12, 8192
WIDE = replace(TILE, group_m=16)
# Of results that are scattered: where the waves of narrow tiles are shorter by that, these take .82
# to 1.06 of the time of wide ones, .93 on average; .72 to 1.04 and .91 beside others (17 shapes,
# 2 x H200, 2026-11-28, h200x2/pushes.jsonl); elsewhere .87 to 1.37, 1.04 on average (170
# measurements in configs/tuned).
NARROW_WAVES = 0.97
SMS = 132  # of the Hopper GPUs that have run it
# Of GEMM+AR: up to this size of y every rank gets all results of two ranks, and adds them up. With
# narrow tiles that takes .89 to .99 of the time of two trips in five shapes, .68 to 1.04 beside
# others; of 20 MiB 1.04 and 1.11, 1.04 and 1.15 (2 x H200, 2026-11-28, h200x2/pushes.jsonl). Over
# four ranks twice as much would travel: .95, and 1.10 beside others (1152 x 4096 x 6144).
EXCHANGED_BYTES = 18 << 20
LOW_TILE_ROWS = 1024  # of all ranks: with more no GEMM was fastest with tiles of 64 rows
# Eight took 1 us less to 2 more where K is 12288, and 19 more at 128 x 5120 x 8192: copies of 128
# KB and their signals take longer than they hide (2 x H100, 2026-11-25, h100x2/k_parts.jsonl).
K_PARTS = 4
PART_COLUMNS_MIN = 512


@lru_cache(maxsize=1024)  # a choice asks twice
def default_plan(problem: Problem) -> Plan:
    """Large communication tiles, and groups of 16 rows of tiles, narrow where their waves are."""
    if problem.spec.gathers:
        low = problem.M_shard < TILE.block_m
        wide = wide_tile(problem.M, problem.N_local, problem.K_local)
        return Plan("hopper", tile=_tile_of(problem, LOW[0] if low else wide))
    return _exchanged(problem) or _scattered(problem)


def _exchanged(problem: Problem) -> Plan | None:
    """Of GEMM+AR with few rows."""
    few = problem.M * problem.N_local * 2 <= EXCHANGED_BYTES
    if problem.pattern is Pattern.GEMM_AR and problem.world_size == 2 and few:
        return None if problem.scaled else Plan("hopper", tile=NARROW, transport="exchange")
    return None


def _scattered(problem: Problem) -> Plan:
    push = chosen(problem)
    return _pushed(problem, *push, _tile_of(problem, _scattered_tile(problem, push)))


def _scattered_tile(problem: Problem, push: Push) -> Tile:
    """Where the waves of narrow tiles are shorter, these. Over more than two ranks groups of 16
    rows may have tiles for several of them, which copy engines would push late: groups of 8 take
    .91 to 1.00 of the time there, also beside others (six shapes, 4 x H200, 2026-11-28,
    h200x4/pushes.jsonl); with stores of the SMs .97 to 1.02.
    """
    if problem.scaled:
        return WIDE
    if _wave_columns(problem, NARROW) < NARROW_WAVES * _wave_columns(problem, WIDE):
        return NARROW
    several = problem.world_size > 2 and problem.M_shard < WIDE.group_m * WIDE.block_m
    return replace(WIDE, group_m=8) if several and push != BY_SM else WIDE


def _wave_columns(problem: Problem, tile: Tile) -> float:
    """How long the last CTA of a GEMM whose results are scattered works, in columns of tiles."""
    k_tiles = cdiv(problem.K_local, tile.block_k)
    tiles = problem.world_size * tiles_of_shard(problem.M_shard, problem.N_local, tile)
    split = split_last_wave(tiles, k_tiles, SMS, tile)
    return tile.block_n * split.waves(k_tiles, PART_K_TILES)


def _pushed(problem: Problem, transport: str, comm_tiles: int, tile: Tile) -> Plan:
    comm_rows = cdiv(problem.M_shard, comm_tiles)
    return Plan("hopper", comm_rows=comm_rows, tile=tile, transport=transport)


def _tile_of(problem: Problem, tile: Tile) -> Tile:
    """`tile`, or what FP8 has in its place: k-tiles of as many bytes. A split accumulator has its
    sums in registers twice, and GEMM+RS to fp32 has them in shared memory too: they take NARROW.
    """
    if not problem.scaled:
        return tile
    wide_sums = problem.spec.scatters and problem.out_dtype == "float32"
    if tile.block_m == TILE.block_m and (problem.split_accumulator or wide_sums):
        tile = replace(NARROW, num_stages=5) if wide_sums else NARROW
    long = problem.split_accumulator and problem.K_local >= SQUARE_K
    if long and problem.world_size == 2 and tile.block_m == tile.block_n:
        tile = replace(tile, group_m=SQUARE_GROUP)
    return replace(tile, block_k=2 * tile.block_k)


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why no call of the problem has this plan, or None: shared memory holds a slice of a stored
    tile beside the stages, of GEMM+RS and GEMM+AR the whole tile.
    """
    if plan.transport == "exchange" and (problem.pattern is not Pattern.GEMM_AR or problem.wire):
        what = "with e4m3 on the wire" if problem.wire else f"of {problem.pattern}"
        return f"every rank adds up all results of GEMM+AR in 16 bits, none {what}"
    if plan.transport == "engines" and (problem.pattern is not Pattern.GEMM_AR or problem.scaled):
        return f"copy engines push sums of GEMM+AR in 16 bits, none of {problem}"
    if plan.transport == "engines":
        rows = cdiv(problem.M, problem.world_size)
        if tiles_of_shard(rows, problem.N_local, plan.tile) < 2:
            return f"a shard of {rows} x {problem.N_local} is one tile, whose sum cannot go early"
    tile, out_dtype = plan.tile, getattr(torch, problem.out_dtype) if problem.scaled else None
    slices = 1 if problem.spec.gathers else tile.block_n // SLICE_COLUMNS
    if (fitting := slice_buffers(tile, out_dtype)) >= slices:
        return None
    shape = f"{tile.block_m} x {tile.block_n} x {tile.block_k} in {tile.num_stages} stages"
    return f"a tile of {shape} leaves room for {fitting} slices of results, {slices} expected"


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring."""
    default = default_plan(problem)
    if problem.scaled:
        return _of_fp8(problem, default)
    narrow = replace(default, tile=NARROW)
    if problem.spec.gathers:
        if problem.M_shard < TILE.block_m:
            low = [replace(default, tile=tile) for tile in LOW]
            return low + _in_parts_of_k(problem, low)
        plans = [default, narrow]
        if problem.M <= LOW_TILE_ROWS:
            low = [replace(default, tile=tile) for tile in LOW]
            plans += [*low, *_in_parts_of_k(problem, [default, narrow])]
        return plans
    tiles = dict.fromkeys((_scattered(problem).tile, NARROW, WIDE, replace(WIDE, group_m=8)))
    pushes = chosen(problem), *others(problem)
    scattered = [_pushed(problem, *push, tile) for push in pushes for tile in tiles]
    if problem.pattern is Pattern.GEMM_AR:
        scattered += [_pushed(problem, *push, WIDE) for push in of_sums(problem)]
    return [*dict.fromkeys((default, *scattered))]


def _of_fp8(problem: Problem, default: Plan) -> list[Plan]:
    """GEMMs are half as long beside results of 16 bits: who pushes them matters more than tiles."""
    plans = [default]
    if problem.spec.scatters:
        plans += [_pushed(problem, *push, default.tile) for push in others(problem)]
    if problem.M_shard >= TILE.block_m:
        plans += [replace(plan, tile=_tile_of(problem, NARROW)) for plan in plans]
    return [*dict.fromkeys(plans)]


def _in_parts_of_k(problem: Problem, plans: list[Plan]) -> list[Plan]:
    """The same with rows that come in parts of K, where K is long enough."""
    long = problem.K_local >= K_PARTS * PART_COLUMNS_MIN
    return [replace(plan, k_parts=K_PARTS) for plan in plans if long]
