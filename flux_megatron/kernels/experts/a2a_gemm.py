"""a2a_gemm: rows travel to the ranks of their experts, and are multiplied there, in one kernel.

a2a_gemm_kernel   the first CTAs push: rows of a group go straight into their place in the owner's
                  buffer, the last tile of a signal's groups raises [Y] there. The others begin
                  with the GEMM tiles of local rows, read from x itself, then take those of
                  rank+1, rank+2, ...: wait [Y], then load

Which tile belongs to which group only the device knows (`routes`). CTAs draw tiles. One that comes
to a remote tile first pushes what nobody has pushed, so one resident CTA is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.call import ExpertCall
from flux_megatron.kernels.experts.routes import (
    DRAWS,
    MORE_DRAWS,
    OWN_SEND_TILES,
    RECV_COUNT,
    RECV_ROW,
    RECV_ROWS,
    RECV_TILE,
    RECV_TILES,
    SEND_COUNT,
    SEND_REMOTE_ROW,
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
    acquire_for_tma_loads,
    deadline_after,
    wait_acquire_sys,
)
from flux_megatron.kernels.triton_launch import launch_kernel

PUSHERS = 24  # CTAs that push first: enough for NVLink, few enough for the GEMM


@triton.jit
def push_rows(
    x, routes, pointers, pad_pointers, rank, epoch, K,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr,
    HEADER: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_G: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Push what nobody has drawn yet: remote groups first and, with KEEP, the local ones last."""
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    tiles = field(routes, SEND_TILE, groups)
    counts = field(routes, SEND_COUNT, groups)
    draws = word(routes, MORE_DRAWS, groups)
    own = tl.load(word(routes, OWN_SEND_TILES, groups))
    remote = tl.load(word(routes, SEND_TILES, groups)) - own
    work_tiles = remote
    if KEEP:
        work_tiles += own
    work_tile = end_draw(begin_draw(draws, NUM_WARPS))
    while work_tile < work_tiles:
        ticket = begin_draw(draws, NUM_WARPS)  # awaited when these rows are stored
        tile = tl.where(work_tile < remote, work_tile + own, work_tile - remote)
        group = group_of(tiles, tile, groups, BLOCK_G)
        step, expert = group // EXPERTS, group % EXPERTS
        owner = (rank + WORLD_SIZE - step) % WORLD_SIZE
        row = (tile - tl.load(tiles + group)) * ROWS
        first = tl.load(field(routes, SEND_ROW, groups) + group) + row
        there = tl.load(field(routes, SEND_REMOTE_ROW, groups) + group) + row
        buffer = tl.multiple_of((tl.load(pointers + owner) + HEADER).to(x.dtype), 16)
        count = tl.load(counts + group) - row
        source = x + first.to(tl.int64) * K
        copy_rows(buffer + there.to(tl.int64) * K, source, count, K, ROWS, COLUMNS)
        announce_group(
            routes, tiles, counts, pad_pointers, step, expert, owner, rank, epoch, 1,
            ROWS, EXPERTS, WORLD_SIZE, PER_SIGNAL,
        )  # signal [Y]  # fmt: skip
        work_tile = end_draw(ticket)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "capacity", "w_first", "w_pitch"])
def a2a_gemm_kernel(
    x, w, y, routes, pointers, pad, pad_pointers, status, rank, epoch, timeout_ns: tl.int64,
    capacity, w_first, w_pitch, N, K,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr,
    HEADER: tl.constexpr, PUSHERS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    pushing = tl.program_id(0) >= PUSHERS  # before the first remote tile
    if tl.program_id(0) < PUSHERS:
        push_rows(
            x, routes, pointers, pad_pointers, rank, epoch, K,
            WORLD_SIZE, EXPERTS, PER_SIGNAL, HEADER, KEEP, ROWS, COLUMNS, BLOCK_G, NUM_WARPS,
        )  # fmt: skip
    first_tiles = field(routes, RECV_TILE, groups)
    draws = word(routes, DRAWS, groups)
    rows_here = tl.load(word(routes, RECV_ROWS, groups))
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.load(word(routes, RECV_TILES, groups)) * tiles_n
    empty = tl.cdiv(capacity - rows_here, BLOCK_M) * tiles_n
    received = tl.multiple_of((tl.load(pointers + rank) + HEADER).to(x.dtype), 16)
    operand = experts_operand(w, w_first, w_pitch, N, K, EXPERTS, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = end_draw(begin_draw(draws, NUM_WARPS))
    while tile < tiles + empty:
        ticket = begin_draw(draws, NUM_WARPS)  # awaited when this tile is stored
        if tile < tiles:
            group = group_of(first_tiles, tile // tiles_n, groups, BLOCK_G)
            step, expert = group // EXPERTS, group % EXPERTS
            count = tl.load(field(routes, RECV_COUNT, groups) + group)
            within = tile - tl.load(first_tiles + group) * tiles_n
            tiles_m = tl.cdiv(count, BLOCK_M)
            row, col = tile_origin(within, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
            place = tl.load(field(routes, RECV_ROW, groups) + group).to(tl.int64)
            rows = x + tl.load(field(routes, SEND_ROW, groups) + group).to(tl.int64) * K
            if step != 0:
                if pushing:
                    push_rows(
                        x, routes, pointers, pad_pointers, rank, epoch, K,
                        WORLD_SIZE, EXPERTS, PER_SIGNAL, HEADER, KEEP, ROWS, COLUMNS, BLOCK_G,
                        NUM_WARPS,
                    )  # fmt: skip
                    pushing = step == 0
                source = (rank + step) % WORLD_SIZE
                slot = source * MAX_COMM_TILES + 1 + expert // PER_SIGNAL
                wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [Y]
                if TMA:
                    acquire_for_tma_loads()
                rows = received + place * K
            acc = expert_tile(
                rows, operand, expert, w_first, w_pitch, row, col, count, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA,
            )  # fmt: skip
            # not by TMA, whose completion every CTA would await before its next tile
            out = y + place * N
            store_tile(out, acc, row, col, count, N, BLOCK_M, BLOCK_N, TMA=False)
        else:
            row = rows_here + (tile - tiles) // tiles_n * BLOCK_M
            col = (tile - tiles) % tiles_n * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            store_tile(y, acc, row, col, capacity, N, BLOCK_M, BLOCK_N, TMA=False)
        tile = end_draw(ticket)


def a2a_gemm(
    x: Tensor, w: ExpertWeights, routes: Tensor, about: ExpertCall, *, keep: bool
) -> Tensor:
    """x [T, K] to the ranks of its experts, times w [E, N, K] ("nn": [E, K, N]) there: y
    [capacity, N], 0 in rows that nobody sent. With `keep` local rows are copied to the buffer too.
    """
    K, N = x.shape[1], w.columns(about.layout)
    y = x.new_empty(about.capacity, N)
    launch_kernel(
        a2a_gemm_kernel, launch.persistent_grid(x.device, about.most_tiles(N)),
        launch.without_tma_if_unaligned(about.tile, (K, N), x, w.matrices),
        (x, w.matrices, y, routes, *about.call.tensors),
        (*about.call.numbers, about.capacity, w.first, w.pitch), (N, K),
        KEEP=keep, PUSHERS=PUSHERS, **about.constants(K),
    )  # fmt: skip
    return y
