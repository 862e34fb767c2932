"""GEMM+RS: y = reduce_scatter(x @ w), the scatter in the GEMM's epilogue (FLUX, algorithm 1).

gemm_rs_kernel          takes the tiles of the shard of rank+1 first, of the local shard last;
                        stores each into block `rank` of its owner's receive buffer; the last
                        tile of a communication tile raises signal [B] at the owner; CTAs draw
                        tiles from a work counter
reduce_received_kernel  waits [B] of every rank, then sums the blocks in fp32 in rank order
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels import launch
from flux_megatron.kernels.portable.gemm_tile import gemm_tile, store_tile, tile_origin, w_operand
from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    complete_tma_stores,
    count_acq_rel_gpu,
    signal_release_sys,
)
from flux_megatron.kernels.sizes import tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling, scales_or
from flux_megatron.symm.program import Memory, Number


@triton.jit
def announce_rows(
    pad, counters, owner, rank, row, M_shard, tiles_n, comm_rows, epoch, BLOCK_M: tl.constexpr
):
    """Count this tile in each communication tile that it overlaps; the last one to arrive
    signals the owner.
    """
    last_row = tl.minimum(row + BLOCK_M, M_shard) - 1
    for comm_tile in range(row // comm_rows, last_row // comm_rows + 1):
        first = comm_tile * comm_rows
        last = tl.minimum(first + comm_rows, M_shard) - 1
        arrivals = (last // BLOCK_M - first // BLOCK_M + 1) * tiles_n
        if count_acq_rel_gpu(counters + owner * MAX_COMM_TILES + comm_tile, arrivals):
            signal_release_sys(pad, rank * MAX_COMM_TILES + comm_tile, epoch)  # signal [B]


# numbers that change from call to call must not compile new kernels
@triton.jit(do_not_specialize=["rank", "epoch", "comm_rows"])
def gemm_rs_kernel(
    x, w, x_scale, w_scale, received_here, received_pointers, pad_pointers, counters,
    work_counter, rank, epoch, comm_rows, M_shard, N, K,
    WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SCALED: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M_shard, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_shard = tiles_m * tiles_n
    tiles = WORLD_SIZE * tiles_shard
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = first_tile(work_counter)
    while tile < tiles:
        ticket = begin_draw(work_counter, NUM_WARPS)  # awaited when this tile is stored
        owner = (rank + 1 + tile // tiles_shard) % WORLD_SIZE
        row, col = tile_origin(tile % tiles_shard, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        rows = x + owner.to(tl.int64) * M_shard * K
        acc = gemm_tile(
            rows, right, row, col, M_shard, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
        )
        if SCALED:
            acc *= tl.load(x_scale) * tl.load(w_scale)
        received = tl.load(received_pointers + owner).to(received_here.dtype)
        block = received + tl.cast(rank, tl.int64) * M_shard * N
        store_tile(block, acc, row, col, M_shard, N, BLOCK_M, BLOCK_N, TMA)
        if TMA:
            complete_tma_stores()
        pad = tl.load(pad_pointers + owner).to(counters.dtype)
        announce_rows(pad, counters, owner, rank, row, M_shard, tiles_n, comm_rows, epoch, BLOCK_M)
        tile = settle(end_draw(ticket), work_counter)
    close_draws(tile, tiles, work_counter)


def gemm_rs(
    x: Memory, w: Memory, *, received: Memory, received_pointers: Memory, pad_pointers: Memory,
    counters: Memory, work_counter: Memory, rank: int, world_size: int, epoch: Number,
    comm_rows: int, layout: str, tile: Tile, scaling: Scaling | None = None,
) -> None:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]); the rows of shard r go into block `rank` [M / R, N] of
    rank r's receive buffer. `received_pointers` [R] has the addresses of all receive buffers,
    `received` is this rank's.
    """
    M_shard, K = x.shape[0] // world_size, x.shape[1]
    N = w.shape[0] if layout == "nt" else w.shape[1]
    tile = launch.without_tma_if_unaligned(tile, (K, N), x, w)
    tiles = world_size * tiles_of_shard(M_shard, N, tile)
    launch_kernel(
        gemm_rs_kernel, launch.persistent_grid(x.device, tiles), tile,
        (
            x, w, *scales_or(x, scaling), received, received_pointers, pad_pointers, counters,
            work_counter,
        ),
        (rank, epoch, comm_rows), (M_shard, N, K),
        WORLD_SIZE=world_size, SCALED=x.dtype.itemsize == 1, LAYOUT_NN=layout == "nn",
    )  # fmt: skip
