"""The first plan of `hopper`, and those that the tuner tries: tiles, communication tiles, who moves
results, and rows in parts of K.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flux_megatron.kernels.hopper.config import (
    LOW,
    NARROW,
    SLICE_COLUMNS,
    TILE,
    slice_buffers,
    wide_tile,
)
from flux_megatron.kernels.hopper.gemm import COMM_TILES_MAX
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Plan, Problem, Tile

BY_SM_BYTES = 8 << 20  # that a rank sends to each peer; more goes by copy engine
# GEMMs of FP8 are half as long, and stores of the SMs hold them up. With a fast accumulator 4 MiB
# take 71 and 191 us by SMs, 82 and 203 by copy engines, with a split one 68 and 205, or 65 and 200;
# 8 MiB 70, 114 and 180, or 78, 105 and 171. Under contention SMs are never slower, in four shapes
# (2 x H200, 2026-11-27, h200x2/fp8_pushes.jsonl).
FP8_BY_SM_BYTES = 4 << 20
# In how many communication tiles copy engines push a shard of more than so many bytes. Where K is
# short the link ends behind the GEMM, and what is multiplied behind the last arrival is one of
# these. Over two ranks four in place of two take .81 to .95 of the time in 13 of 45 races, all with
# K up to 2,048 or 4,096 of FP8, and .98 to 1.01 in the others; eight of more than 64 MiB .95 to
# 1.00 of four. Below 16 MiB four take 1.04 to 1.14 of two. With a split accumulator two of 8 MiB
# take .91 of one (alone and beside others, 2 x H200, 2026-11-28, h200x2/pushes.jsonl). Over more
# ranks there are two at most until that is measured.
PUSHES = ((64 << 20, COMM_TILES_MAX), ((16 << 20) - 1, 4), (BY_SM_BYTES, 2))
# The SMs push more than BY_SM_BYTES where K is short, bytes times K up to this: .87 to .99 of the
# copy engines' time in four shapes, .73 beside others (one, over four ranks), else 1.00 to 1.12
# (16; 2 and 4 x H200, 2026-11-28, pushes.jsonl). Up to LATE_LINK_K they are tried anyway.
BY_SM_BYTES_K = 1 << 35
LATE_LINK_K = 2048
# Groups of 12 rows of NARROW tiles are as high as a wave is wide, and read least. With a split
# accumulator they take .95 to .99 of the time of groups of 16 where K is 12288 or more (nine
# shapes), .99 and 1.00 at 8192, 1.00 and 1.01 below (two each; the same rows and card).
SQUARE_GROUP, SQUARE_K = 12, 8192
FEW_ROWS = 1024  # of all ranks: with more no GEMM was fastest with tiles of 64 rows
# Eight took 1 us less to 2 more where K is 12288, and 19 more at 128 x 5120 x 8192: copies of 128
# KB and their signals take longer than they hide (2 x H100, 2026-11-25, h100x2/k_parts.jsonl).
K_PARTS = 4
PART_COLUMNS_MIN = 512


def default_plan(problem: Problem) -> Plan:
    """Large communication tiles, and groups of 16 rows of tiles."""
    if problem.spec.gathers:
        low = problem.M_shard < TILE.block_m
        wide = wide_tile(problem.M, problem.N_local, problem.K_local)
        return Plan("hopper", tile=_tile_of(problem, LOW[0] if low else wide))
    size_bytes = problem.M_shard * problem.N_local * 2
    by_sm = size_bytes <= (FP8_BY_SM_BYTES if problem.scaled else BY_SM_BYTES)
    by_sm |= not problem.scaled and size_bytes * problem.K_local <= BY_SM_BYTES_K
    fewest, most = (2 if problem.split_accumulator else 1), COMM_TILES_MAX
    if problem.world_size > 2:
        fewest, most = 1, 2
    # the SMs signal for nothing, a copy engine takes 10 us to begin each
    comm_tiles = COMM_TILES_MAX if by_sm else min(max(_copies(size_bytes), fewest), most)
    return Plan(
        "hopper",
        comm_rows=cdiv(problem.M_shard, comm_tiles),
        tile=_tile_of(problem, replace(TILE, group_m=16)),
        transport="sm" if by_sm else "copy_engine",
    )


def _copies(size_bytes: int) -> int:
    return next((count for above, count in PUSHES if size_bytes > above), 1)


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
        if problem.M <= FEW_ROWS:
            low = [replace(default, tile=tile) for tile in LOW]
            plans += [*low, *_in_parts_of_k(problem, [default, narrow])]
        return plans
    wide = replace(default, tile=replace(default.tile, group_m=8))
    plans = [default, narrow, wide]
    plans += [
        replace(plan, transport=transport, comm_rows=cdiv(problem.M_shard, comm_tiles))
        for transport, comm_tiles in _other_pushes(problem)
        for plan in (default, narrow, wide)
    ]
    return [*dict.fromkeys(plans)]


def _of_fp8(problem: Problem, default: Plan) -> list[Plan]:
    """GEMMs are half as long beside results of 16 bits: who pushes them matters more than tiles."""
    plans = [default]
    if problem.spec.scatters:
        copies = dict.fromkeys((1, 2, _copies(problem.M_shard * problem.N_local * 2)))
        pushes = ("sm", COMM_TILES_MAX), *(("copy_engine", count) for count in copies)
        plans += [
            replace(default, transport=transport, comm_rows=cdiv(problem.M_shard, comm_tiles))
            for transport, comm_tiles in pushes
        ]
    if problem.M_shard >= TILE.block_m:
        plans += [replace(plan, tile=_tile_of(problem, NARROW)) for plan in plans]
    return [*dict.fromkeys(plans)]


def _other_pushes(problem: Problem) -> list[tuple[str, int]]:
    """Transports of GEMM+RS besides the default, with the communication tiles of a shard."""
    # 2048 x 5120 x 12800, of 10 MiB, takes 386 us by SMs, 403 by copy engines; 2304 x 5120 x 13824,
    # of 11, 484 and 475 (2 of 4 x H200, 2026-11-27, h200x2/trees.jsonl)
    size_bytes = problem.M_shard * problem.N_local * 2
    close = size_bytes <= 2 * BY_SM_BYTES or problem.K_local <= LATE_LINK_K
    by_sm = [("sm", COMM_TILES_MAX)] if close else []
    return [*by_sm, ("copy_engine", max(2, _copies(size_bytes)))]


def _in_parts_of_k(problem: Problem, plans: list[Plan]) -> list[Plan]:
    """The same with rows that come in parts of K, where K is long enough."""
    long = problem.K_local >= K_PARTS * PART_COLUMNS_MIN
    return [replace(plan, k_parts=K_PARTS) for plan in plans if long]
