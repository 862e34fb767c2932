"""AG+GEMM: y = all_gather(x) @ w in one kernel whose tiles wait for their rows (FLUX, algorithm 2).

    copy engine  pushes x of rank s into gathered[s] of every rank, then signals [A] in slot
                 (s, communication tile)
    this kernel  takes the tiles of the local shard first, read from x itself, then those of
                 rank+1, rank+2, ...: waits [A], then loads. CTAs draw tiles from a work
                 counter

The gathered buffer need not hold the local shard. Communication tiles and GEMM tiles may have any
sizes.
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
from flux_megatron.kernels.primitives import acquire_for_tma_loads, deadline_after, wait_rows
from flux_megatron.kernels.sizes import tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling, result_dtype, scales_or
from flux_megatron.symm.program import Memory, Number


# numbers that change from call to call must not compile new kernels
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "comm_rows"])
def ag_gemm_kernel(
    x, gathered, w, bias, x_scale, w_scale, y, pad, status, work_counter, rank, epoch,
    timeout_ns: tl.int64, comm_rows, M_shard, N, K,
    WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, LAYOUT_NN: tl.constexpr,
    TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    tiles_m = tl.cdiv(M_shard, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_shard = tiles_m * tiles_n
    tiles = WORLD_SIZE * tiles_shard
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = first_tile(work_counter)
    while tile < tiles:
        ticket = begin_draw(work_counter, NUM_WARPS)  # awaited when this tile is stored
        source = (rank + tile // tiles_shard) % WORLD_SIZE
        row, col = tile_origin(tile % tiles_shard, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        rows = x
        if source != rank:
            last_row = tl.minimum(row + BLOCK_M, M_shard) - 1
            wait_rows(pad, source, row, last_row, comm_rows, epoch, deadline, status)  # wait [A]
            if TMA:
                acquire_for_tma_loads()
            rows = gathered + source.to(tl.int64) * M_shard * K
        acc = gemm_tile(
            rows, right, row, col, M_shard, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
        )
        if SCALED:
            acc *= tl.load(x_scale) * tl.load(w_scale)
        if HAS_BIAS:
            cols = col + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        out = y + source.to(tl.int64) * M_shard * N
        # not by TMA: every CTA would wait for its completion before the next tile
        store_tile(out, acc, row, col, M_shard, N, BLOCK_M, BLOCK_N, TMA=False)
        tile = settle(end_draw(ticket), work_counter)
    close_draws(tile, tiles, work_counter)


def ag_gemm(
    x: Memory, gathered: Memory, w: Memory, bias: Memory | None, *,
    pad: Memory, status: Memory, work_counter: Memory, rank: int, epoch: Number, timeout_ns: int,
    comm_rows: int, layout: str, tile: Tile, scaling: Scaling | None = None,
) -> Memory:  # fmt: skip
    """x [M_shard, K] and gathered [R * M_shard, K] times w ([N, K] or [K, N]) + bias [N].

    Gives y [R * M_shard, N].
    """
    M, (M_shard, K) = gathered.shape[0], x.shape
    N = w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(M, N, dtype=result_dtype(x, scaling))
    tile = launch.without_tma_if_unaligned(tile, (K, N), x, w)
    tiles = M // M_shard * tiles_of_shard(M_shard, N, tile)
    launch_kernel(
        ag_gemm_kernel, launch.persistent_grid(x.device, tiles), tile,
        (
            x, gathered, w, bias if bias is not None else x, *scales_or(x, scaling), y, pad, status,
            work_counter,
        ),
        (rank, epoch, timeout_ns, comm_rows), (M_shard, N, K),
        WORLD_SIZE=M // M_shard, HAS_BIAS=bias is not None, SCALED=x.dtype.itemsize == 1,
        LAYOUT_NN=layout == "nn",
    )  # fmt: skip
    return y
