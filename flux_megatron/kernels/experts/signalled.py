"""A grouped GEMM of experts whose tiles are made, and counted, band after band, for all-to-alls
that run beside it.

A **group** is the rows that one rank has for one expert here. The host knows all sizes and writes a
table of the groups; `expert_parallel/bands.py` has their order.

| tensor | rows of |
| --- | --- |
| home | all groups, sorted by (expert, source rank) |
| far | groups of other ranks, where all-to-alls put or take them |
| near | this rank's own groups, as its tokens lie |

"back" multiplies home into far and near, and counts each stored tile of far in its band's counter
(signal [D]). "there" multiplies far and near into home, and counts nothing. The kernel waits for
nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.routes import group_of
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.portable.gemm_tile import (
    expert_tile,
    experts_operand,
    store_tile,
    tile_origin,
)
from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import complete_tma_stores, count_release_sys
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

# of each group, int32 [6, groups]: its first row of tiles, its rows, expert and band, and its
# first row in home, and in far or near
FIRST, ROWS, EXPERT, BAND, HOME, AWAY = (tl.constexpr(n) for n in range(6))


@triton.jit
def field(table, number: tl.constexpr, group, GROUPS: tl.constexpr):
    """A field of one group."""
    return tl.load(table + number * GROUPS + group)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["first", "tile_rows", "w_first", "w_pitch"])
def signalled_experts_kernel(
    home, far, near, w, table, counters, work_counter, first, tile_rows, w_first, w_pitch, N, K,
    GROUPS: tl.constexpr, FAR_GROUPS: tl.constexpr, EXPERTS: tl.constexpr, BACK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tile_rows * tiles_n
    operand = experts_operand(w, w_first, w_pitch, N, K, EXPERTS, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = first_tile(work_counter)
    while tile < tiles:
        ticket = begin_draw(work_counter, NUM_WARPS)  # awaited when this tile is stored
        group = group_of(table, first + tile // tiles_n, GROUPS, BLOCK_G)
        rows = field(table, ROWS, group, GROUPS)
        within = tile - (field(table, FIRST, group, GROUPS) - first) * tiles_n
        tiles_m = tl.cdiv(rows, BLOCK_M)
        row, col = tile_origin(within, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        here = field(table, HOME, group, GROUPS).to(tl.int64)
        there = field(table, AWAY, group, GROUPS).to(tl.int64)
        away = near
        if group < FAR_GROUPS:
            away = far
        if BACK:
            x, out = home + here * K, away + there * N
        else:
            x, out = away + there * K, home + here * N
        expert = field(table, EXPERT, group, GROUPS)
        acc = expert_tile(
            x, operand, expert, w_first, w_pitch, row, col, rows, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA,
        )  # fmt: skip
        if BACK:
            store_tile(out, acc, row, col, rows, N, BLOCK_M, BLOCK_N, TMA)
            if TMA:
                complete_tma_stores()
            if group < FAR_GROUPS:
                count_release_sys(counters + field(table, BAND, group, GROUPS))  # signal [D]
        else:  # not by TMA, whose completion every CTA would await before its next tile
            store_tile(out, acc, row, col, rows, N, BLOCK_M, BLOCK_N, TMA=False)
        tile = settle(end_draw(ticket), work_counter)
    close_draws(tile, tiles, work_counter)


def signalled_experts(
    home: Tensor, far: Tensor, near: Tensor, w: ExpertWeights, table: Tensor, *,
    far_groups: int, first: int, tile_rows: int, counters: Tensor, work_counter: Tensor,
    spare_sms: int, back: bool, layout: str, tile: Tile,
) -> None:  # fmt: skip
    """`tile_rows` rows of tiles from `first` on, times w [E, N, K] ("nn": [E, K, N]).

    With `back` from home [rows, K] into far and near [rows, N], else from far and near [rows, K]
    into home [rows, N]. `table` is int32 [6, groups], its first `far_groups` groups lie in
    far. Adds 1 to the counter of its band for each tile of far, with `back`. `spare_sms` SMs get no
    CTA.
    """
    if not tile_rows:
        return
    experts, *sides = w.matrices.shape
    N, K = sides if layout == "nt" else reversed(sides)
    groups = table.shape[1]
    launch_kernel(
        signalled_experts_kernel,
        launch.persistent_grid(home.device, tile_rows * cdiv(N, tile.block_n), spare_sms),
        launch.without_tma_if_unaligned(tile, (K, N), home, w.matrices, far, near),
        (home, far, near, w.matrices, table, counters, work_counter),
        (first, tile_rows, w.first, w.pitch), (N, K),
        GROUPS=groups, FAR_GROUPS=far_groups, EXPERTS=experts, BACK=back,
        BLOCK_G=next_power_of_2(groups), LAYOUT_NN=layout == "nn",
    )  # fmt: skip
