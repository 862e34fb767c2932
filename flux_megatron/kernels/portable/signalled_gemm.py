"""A GEMM that counts its tiles, band by band, for collectives that run beside it (FlashOverlap).

A wave group is a band of rows of y. CTAs draw tiles from a work counter, the tiles of the first
band first, and count each stored tile in the band's counter (signal [D]). A stream that holds no SM
waits for the count and starts a plain collective of the band.

| collective | band g has | where it lies in `out` |
| --- | --- | --- |
| reduce-scatter | some rows of each of R shards | a block [R, rows, N], behind the bands before |
| all-reduce, R = 1 | some rows of y | in y itself |

So each band is contiguous, a reduce-scatter of it gives rows of Megatron's contiguous shard, and no
permutation remains. The kernel waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.portable.gemm_tile import gemm_tile, store_tile, tile_origin, w_operand
from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import complete_tma_stores, count_release_sys
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import MAX_GROUPS, Tile

_GROUPS = tl.constexpr(MAX_GROUPS)
_NO_TILE = 2**31 - 1


class Band(NamedTuple):
    """Rows of y, or of each shard of y, and how many tiles they have."""

    first: int
    rows: int
    tiles: int


def ends_of(rows: int, group_rows: Sequence[int]) -> list[int]:
    """Where the bands of so many rows end: `group_rows` each, as long as there are rows, and one of
    all that is left.
    """
    return [*dict.fromkeys(min(end, rows) for end in accumulate((*group_rows, rows)))]


@lru_cache(maxsize=1024)
def bands(
    rows: int, N: int, shards: int, group_rows: Sequence[int], tile: Tile
) -> tuple[Band, ...]:
    """The bands of y [shards, rows, N]."""
    made, first = [], 0
    for end in ends_of(rows, group_rows):
        size = end - first
        tiles = shards * cdiv(size, tile.block_m) * cdiv(N, tile.block_n)
        made.append(Band(first, size, tiles))
        first = end
    return tuple(made)


def table_of(bands: Sequence[Band], device: torch.device) -> Tensor:
    """What the kernel reads of the bands, int32 [3, MAX_GROUPS]: the first tile, the first row and
    the rows of each.
    """
    first_tile, columns = 0, []
    for band in bands:
        columns.append((first_tile, band.first, band.rows))
        first_tile += band.tiles
    columns += [(_NO_TILE, 0, 0)] * (MAX_GROUPS - len(bands))
    return torch.tensor(columns, dtype=torch.int32).t().contiguous().to(device)


@triton.jit
def band_of(tile, table):
    """The number of a tile's band, the band's first tile, its first row and its rows."""
    firsts = tl.load(table + tl.arange(0, _GROUPS))
    band = tl.sum((firsts <= tile).to(tl.int32), 0) - 1
    entry = table + band
    return band, tl.load(entry), tl.load(entry + _GROUPS), tl.load(entry + 2 * _GROUPS)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["tiles"])
def signalled_gemm_kernel(
    x, w, out, table, counters, work_counter, tiles, M_shard, N, K,
    SHARDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = first_tile(work_counter)
    while tile < tiles:
        ticket = begin_draw(work_counter, NUM_WARPS)  # awaited when this tile is stored
        band, first, first_row, rows = band_of(tile, table)
        # the rows of all shards are one column of tiles: more rows to reuse w for
        tiles_m = tl.cdiv(rows, BLOCK_M)
        row, col = tile_origin(tile - first, SHARDS * tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        shard = row // (tiles_m * BLOCK_M)
        row -= shard * tiles_m * BLOCK_M
        x_rows = x + (shard * M_shard + first_row).to(tl.int64) * K
        acc = gemm_tile(
            x_rows, right, row, col, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
        )
        out_rows = out + (SHARDS * first_row + shard * rows).to(tl.int64) * N
        store_tile(out_rows, acc, row, col, rows, N, BLOCK_M, BLOCK_N, TMA)
        if TMA:
            complete_tma_stores()
        count_release_sys(counters + band)  # signal [D]
        tile = settle(end_draw(ticket), work_counter)
    close_draws(tile, tiles, work_counter)


def signalled_gemm(
    x: Tensor, w: Tensor, out: Tensor, *, table: Tensor, tiles: int, shards: int, counters: Tensor,
    work_counter: Tensor, spare_sms: int, layout: str, tile: Tile,
) -> None:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]) into out [M, N], band after band, `tiles` in all.

    Adds 1 to counters[g], int32 [MAX_GROUPS], for each tile of band g, which must be 0 before.
    `spare_sms` SMs get no CTA: the collectives run there.
    """
    (M, K), N = x.shape, w.shape[0] if layout == "nt" else w.shape[1]
    launch_kernel(
        signalled_gemm_kernel, launch.persistent_grid(x.device, tiles, spare_sms),
        launch.without_tma_if_unaligned(tile, (K, N), x, w),
        (x, w, out, table, counters, work_counter), (tiles,), (M // shards, N, K),
        SHARDS=shards, LAYOUT_NN=layout == "nn",
    )  # fmt: skip
