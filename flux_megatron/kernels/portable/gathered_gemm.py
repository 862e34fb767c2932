"""AG+GEMM beside an all-gather that others make, in bands of rows: the tiles of the local shard,
then those of each band that has come. A stream flags a band when it is there [V].

A CTA that finds the next band not there waits for it, but not for long: then it leaves, and what is
left is for the next launch of the same call, behind all bands. They leave one after the other, for
a band may be late because NCCL kernels of this group and of others wait for SMs in a circle: those
soon have what they need, and the other CTAs go on. A launch that goes on from band to band has one
last wave; a GEMM for each band has one a band.

Band 0 is the local shard, band g > 0 has some rows of every shard, as one block [R, rows, K].
`words` say how far a call is, int32 [WORDS], all 0 when it begins: how many tiles of each band are
drawn, then the bands' flags, then the longest wait of a CTA in us.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.portable.gemm_tile import gemm_tile, store_tile, tile_origin, w_operand
from flux_megatron.kernels.portable.tile_draws import begin_draw, end_draw
from flux_megatron.kernels.primitives import acquire_for_tma_loads, arrives_acquire_sys
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import MAX_GROUPS, Tile
from flux_megatron.symm.program import Memory

BANDS = 2 * MAX_GROUPS  # words of each kind: for all bands and the local shard
FLAGS, WAITED, WORDS = BANDS, 2 * BANDS, 3 * BANDS
_GROUPS, _BANDS = tl.constexpr(MAX_GROUPS), tl.constexpr(BANDS)
_FLAGS, _WAITED = tl.constexpr(FLAGS), tl.constexpr(WAITED)


@triton.jit
def rows_of(band, table, M_shard):
    """Of a shard."""
    rows = M_shard
    if band > 0:
        rows = tl.load(table + (2 * _GROUPS - 1) + band)
    return rows


@triton.jit
def first_band(
    table, words, bands, M_shard, N, OTHERS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first band of which tiles are left, before any draw: a launch finds most bands done."""
    band = tl.arange(0, _BANDS)
    gathered = (band > 0) & (band <= bands)
    rows = tl.load(table + (2 * _GROUPS - 1) + band, mask=gathered, other=0)
    tiles_m = tl.where(
        band == 0, tl.cdiv(M_shard, BLOCK_M), OTHERS * tl.cdiv(rows, BLOCK_M)
    )  # fmt: skip
    left = tl.load(words + band) < tiles_m * tl.cdiv(N, BLOCK_N)
    return tl.min(tl.where(left, band, bands + 1), 0)


@triton.jit
def next_tile(
    place, tiles, band, table, words, bands, patience_us, M_shard, N, OTHERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The drawn place, if the band has so many `tiles`; else one of the next band that has tiles
    left. Gives place, tiles and band: one behind the last where the next has not come.
    """
    while place >= tiles:
        band += 1
        place = 0
        tiles = 1
        if band <= bands:
            here = band == 0
            if band > 0:
                here = arrives_acquire_sys(words + _FLAGS + band, words + _WAITED, patience_us)
                if TMA:
                    acquire_for_tma_loads()
            if here:  # wait [V]
                place = tl.atomic_add(words + band, 1, sem="relaxed", scope="gpu")
                tiles = tl.cdiv(rows_of(band, table, M_shard), BLOCK_M) * tl.cdiv(N, BLOCK_N)
                if band > 0:
                    tiles *= OTHERS
            else:
                band = bands + 1
    return place, tiles, band


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "bands", "step_us"])
def gathered_gemm_kernel(
    x, blocks, w, bias, y, table, words, rank, bands, step_us, M_shard, N, K,
    SHARDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    band = first_band(table, words, bands, M_shard, N, SHARDS - 1, BLOCK_M, BLOCK_N) - 1
    none = band * 0
    patience_us = step_us * tl.program_id(0)
    place, tiles, band = next_tile(
        none, none, band, table, words, bands, patience_us, M_shard, N, SHARDS - 1, BLOCK_M,
        BLOCK_N, TMA,
    )  # fmt: skip
    while band <= bands:
        ticket = begin_draw(words + band, NUM_WARPS)  # awaited when this tile is stored
        rows = rows_of(band, table, M_shard)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        x_rows = x
        first_out = rank.to(tl.int64) * M_shard
        shards = 1
        if band > 0:
            shards = SHARDS - 1
        row, col = tile_origin(place, shards * tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        if band > 0:
            source = (rank + 1 + row // (tiles_m * BLOCK_M)) % SHARDS
            row = row % (tiles_m * BLOCK_M)
            first = tl.load(table + (_GROUPS - 1) + band)
            x_rows = blocks + (SHARDS * first + source * rows).to(tl.int64) * K
            first_out = source.to(tl.int64) * M_shard + first
        acc = gemm_tile(
            x_rows, right, row, col, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
        )
        if HAS_BIAS:
            cols = col + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        # not by TMA: every CTA would wait for its completion before the next tile
        store_tile(y + first_out * N, acc, row, col, rows, N, BLOCK_M, BLOCK_N, TMA=False)
        place, tiles, band = next_tile(
            end_draw(ticket), tiles, band, table, words, bands, patience_us, M_shard, N, SHARDS - 1,
            BLOCK_M, BLOCK_N, TMA,
        )  # fmt: skip


def gathered_gemm(
    x: Memory, blocks: Memory, w: Memory, bias: Memory | None, y: Memory, *, table: Tensor | Memory,
    words: Memory, rank: int, bands: int, step_us: int, spare_sms: int, layout: str, tile: Tile,
) -> None:  # fmt: skip
    """x [M_shard, K] and blocks [R * M_shard, K] times w ([N, K] or [K, N]) + bias [N], into y
    [R * M_shard, N]. `table` is that of the `bands` (`signalled_gemm.table_of`). While one is
    awaited, a CTA leaves every `step_us`. `spare_sms` SMs get none: the all-gather runs there.
    """
    (M_shard, K), N = x.shape, w.shape[0] if layout == "nt" else w.shape[1]
    shards = cdiv(blocks.shape[0], M_shard)
    tile = launch.without_tma_if_unaligned(tile, (K, N), x, blocks, w)
    tiles = shards * tiles_of_shard(M_shard, N, tile)
    launch_kernel(
        gathered_gemm_kernel, launch.persistent_grid(x.device, tiles, spare_sms), tile,
        (x, blocks, w, bias if bias is not None else x, y, table, words),
        (rank, bands, step_us), (M_shard, N, K),
        SHARDS=shards, HAS_BIAS=bias is not None, LAYOUT_NN=layout == "nn",
    )  # fmt: skip
