"""gemm_a2a: rows are multiplied by their experts' matrices and go back where they came from.

gemm_a2a_kernel   takes the tiles of remote groups first: each is stored straight into the rows of
                  its source rank's buffer, and the last tile of a signal's groups raises [Z]
                  there; then the tiles of local groups, stored in y; then copies: waits [Z] for a
                  group of another rank, and copies its rows from the buffer to y

Groups and offsets are those of `experts.routes`. Tiles of remote groups wait for nobody and come
before all that waits, so one resident CTA is enough.

expert_collect_kernel   those copies behind the Hopper kernel of the GEMM: warps that await [Z]
                        beside the tensor cores slow them down, and all SMs copy faster than what a
                        GEMM leaves of them
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.call import ExpertCall
from flux_megatron.kernels.experts.routes import (
    DRAWS,
    OWN_RECV_TILES,
    OWN_SEND_TILES,
    RECV_COUNT,
    RECV_REMOTE_ROW,
    RECV_ROW,
    RECV_TILE,
    RECV_TILES,
    SEND_COUNT,
    SEND_ROW,
    SEND_TILE,
    SEND_TILES,
    announce_group,
    copy_rows,
    field,
    group_of,
    word,
)
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.portable.gemm_tile import (
    expert_tile,
    experts_operand,
    store_tile,
    tile_origin,
)
from flux_megatron.kernels.portable.tile_draws import begin_draw, end_draw
from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    complete_tma_stores,
    deadline_after,
    wait_acquire_sys,
)
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

COLLECTING_CTAS = 4  # of an SM, of 8 warps, so that enough loads are on the way


@triton.jit
def collect(
    y, routes, received, pad, status, work_tile, rank, epoch, deadline, N,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Copy the `work_tile`-th rows that come from another rank, when they are there."""
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    tiles = field(routes, SEND_TILE, groups)
    tile = work_tile + tl.load(word(routes, OWN_SEND_TILES, groups))
    group = group_of(tiles, tile, groups, BLOCK_G)
    step, expert = group // EXPERTS, group % EXPERTS
    source = (rank + WORLD_SIZE - step) % WORLD_SIZE
    row = (tile - tl.load(tiles + group)) * ROWS
    place = (tl.load(field(routes, SEND_ROW, groups) + group) + row).to(tl.int64) * N
    count = tl.load(field(routes, SEND_COUNT, groups) + group) - row
    slot = source * MAX_COMM_TILES + 1 + expert // PER_SIGNAL
    wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [Z]
    copy_rows(y + place, received + place, count, N, ROWS, COLUMNS)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "w_first", "w_pitch"])
def gemm_a2a_kernel(
    x, w, y, routes, pointers, pad, pad_pointers, status, rank, epoch, timeout_ns: tl.int64,
    w_first, w_pitch, N, K,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr,
    HEADER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    first_tiles = field(routes, RECV_TILE, groups)
    counts = field(routes, RECV_COUNT, groups)
    draws = word(routes, DRAWS, groups)
    tiles_n = tl.cdiv(N, BLOCK_N)
    own = tl.load(word(routes, OWN_RECV_TILES, groups)) * tiles_n
    tiles = tl.load(word(routes, RECV_TILES, groups)) * tiles_n
    own_copies = tl.load(word(routes, OWN_SEND_TILES, groups))
    copies = tl.load(word(routes, SEND_TILES, groups)) - own_copies
    received = tl.multiple_of((tl.load(pointers + rank) + HEADER).to(y.dtype), 16)
    operand = experts_operand(w, w_first, w_pitch, N, K, EXPERTS, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = end_draw(begin_draw(draws, NUM_WARPS))
    while tile < tiles + copies:
        ticket = begin_draw(draws, NUM_WARPS)  # awaited when this tile is stored
        if tile < tiles:
            work_tile = tl.where(tile < tiles - own, tile + own, tile - (tiles - own))
            group = group_of(first_tiles, work_tile // tiles_n, groups, BLOCK_G)
            step, expert = group // EXPERTS, group % EXPERTS
            count = tl.load(counts + group)
            within = work_tile - tl.load(first_tiles + group) * tiles_n
            tiles_m = tl.cdiv(count, BLOCK_M)
            row, col = tile_origin(within, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
            rows = x + tl.load(field(routes, RECV_ROW, groups) + group).to(tl.int64) * K
            acc = expert_tile(
                rows, operand, expert, w_first, w_pitch, row, col, count, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA,
            )  # fmt: skip
            place = tl.load(field(routes, RECV_REMOTE_ROW, groups) + group).to(tl.int64) * N
            owner = (rank + step) % WORLD_SIZE
            out = y
            if step != 0:
                out = tl.multiple_of((tl.load(pointers + owner) + HEADER).to(y.dtype), 16)
            store_tile(out + place, acc, row, col, count, N, BLOCK_M, BLOCK_N, TMA)
            if TMA:
                complete_tma_stores()
            if step != 0:
                announce_group(
                    routes, first_tiles, counts, pad_pointers, step, expert, owner, rank, epoch,
                    tiles_n, BLOCK_M, EXPERTS, WORLD_SIZE, PER_SIGNAL,
                )  # signal [Z]  # fmt: skip
        else:
            collect(
                y, routes, received, pad, status, tile - tiles, rank, epoch, deadline, N,
                WORLD_SIZE, EXPERTS, PER_SIGNAL, ROWS, COLUMNS, BLOCK_G,
            )  # fmt: skip
        tile = end_draw(ticket)


def gemm_a2a(
    x: Tensor, w: ExpertWeights, routes: Tensor, about: ExpertCall, *, tokens: int
) -> Tensor:
    """x [capacity, K], sorted by (expert, source rank), times w [E, N, K] ("nn": [E, K, N]), each
    row back at its source: y [tokens, N], in the order in which they were sent.
    """
    K, N = x.shape[1], w.columns(about.layout)
    y = x.new_empty(tokens, N)
    launch_kernel(
        gemm_a2a_kernel, launch.persistent_grid(x.device, about.most_tiles(N)),
        launch.without_tma_if_unaligned(about.tile, (K, N), x, w.matrices),
        (x, w.matrices, y, routes, *about.call.tensors),
        (*about.call.numbers, w.first, w.pitch), (N, K),
        **about.constants(N),
    )  # fmt: skip
    return y


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def expert_collect_kernel(
    received, y, routes, pad, status, rank, epoch, timeout_ns: tl.int64, N,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    own = tl.load(word(routes, OWN_SEND_TILES, groups))
    copies = tl.load(word(routes, SEND_TILES, groups)) - own
    for copy in range(tl.program_id(0), copies, tl.num_programs(0)):
        collect(
            y, routes, received, pad, status, copy, rank, epoch, deadline, N,
            WORLD_SIZE, EXPERTS, PER_SIGNAL, ROWS, COLUMNS, BLOCK_G,
        )  # fmt: skip


def expert_collect(received: Tensor, y: Tensor, routes: Tensor, about: ExpertCall) -> None:
    """Copy rows of experts of other ranks from `received` [capacity, N], this rank's region, to
    y [tokens, N], when [Z] says that they are there.
    """
    most = cdiv(about.capacity, about.comm_rows) + about.groups  # each may end with a part
    (sms,) = launch.persistent_grid(y.device, most)
    _, pad, _, status = about.call.tensors
    launch_kernel(
        expert_collect_kernel, (min(most, COLLECTING_CTAS * sms),), Tile(num_warps=8),
        (received, y, routes, pad, status), about.call.numbers, (y.shape[1],),
        **about.constants(y.shape[1]),
    )  # fmt: skip
