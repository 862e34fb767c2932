"""The kernel of scripts/own_kernel.py in Gluon, for GPUs of compute capability 9.

torchrun --nproc-per-node 2 scripts/own_kernel_gluon.py
"""

from __future__ import annotations

import own_kernel
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import flux_megatron.device.gluon as fm
from flux_megatron.device import SLOTS, Channel

NUM_WARPS = 8


@gluon.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def all_gather_rms_norm_kernel(
    x, weight, y, M_shard, N, tiles_slot,
    buffers, pads, counters, work, status, rank, epoch, timeout_ns: gl.int64,
    EPS: gl.constexpr, WORLD_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    deadline = fm.deadline_after(timeout_ns)
    dtype: gl.constexpr = x.dtype.element_ty
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    gamma = gl.load(weight + cols, mask=cols < N, other=0.0).to(gl.float32)
    tiles_shard = gl.cdiv(M_shard, BLOCK_M)
    tiles = WORLD_SIZE * tiles_shard

    tile = fm.draw_tile(work)
    while tile < tiles:
        source = (rank + tile // tiles_shard) % WORLD_SIZE
        block = tile % tiles_shard
        slot = block // tiles_slot
        rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        inside = (rows < M_shard)[:, None] & (cols < N)[None, :]
        at = rows.to(gl.int64)[:, None] * N + cols[None, :]
        whole = at + source.to(gl.int64) * M_shard * N

        if source == rank:
            values = gl.load(x + at, mask=inside, other=0.0)
            arrivals = gl.minimum(tiles_slot, tiles_shard - slot * tiles_slot)
            for step in range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                fm.put_tile(buffers, peer, whole, values, inside)
                if fm.count_tile(counters, peer, slot, arrivals):
                    fm.signal_tile(pads, peer, rank, slot, epoch)
        else:
            fm.wait_tile(pads, rank, source, slot, epoch, deadline, status)
            gathered = fm.peer_pointer(buffers, rank, dtype)
            values = gl.load(gathered + whole, mask=inside, other=0.0)

        values = values.to(gl.float32)
        mean_square = gl.div_rn(gl.sum(values * values, 1), N * 1.0)
        scale = gl.div_rn(1.0, gl.sqrt_rn(mean_square + EPS))
        result = values * scale[:, None] * gamma[None, :]
        gl.store(y + whole, result.to(dtype), mask=inside)
        tile = fm.draw_tile(work)
    fm.close_draws(tile, tiles, work)


def layout(block_m: int, block_n: int, itemsize: int) -> gl.BlockedLayout:
    """Each thread has whole 16 bytes of a row; warps lie along the rows first."""
    size = min(16 // itemsize, block_n)
    lanes = min(32, block_n // size)
    warps = min(NUM_WARPS, max(1, block_n // (size * lanes)))
    return gl.BlockedLayout([1, size], [32 // lanes, lanes], [NUM_WARPS // warps, warps], [1, 0])


def all_gather_rms_norm(
    x: Tensor, weight: Tensor, channel: Channel, eps: float = 1e-5, block_elements: int = 4096
) -> Tensor:
    """x [M_shard, N] of each rank, contiguous  ->  y [M, N] on every rank."""
    M_shard, N = x.shape
    block_n = triton.next_power_of_2(N)
    block_m = max(1, block_elements // block_n)
    tiles_shard = triton.cdiv(M_shard, block_m)
    y = x.new_empty(channel.world_size * M_shard, N)
    with channel.begin(y.nbytes) as call:
        all_gather_rms_norm_kernel[call.grid(channel.world_size * tiles_shard, ctas_per_sm=2)](
            x, weight, y, M_shard, N, triton.cdiv(tiles_shard, SLOTS), **call.arguments,
            EPS=eps, WORLD_SIZE=channel.world_size, BLOCK_M=block_m, BLOCK_N=block_n,
            LAYOUT=layout(block_m, block_n, x.element_size()), num_warps=NUM_WARPS,
        )  # fmt: skip
    return y


if __name__ == "__main__":
    own_kernel.all_gather_rms_norm = all_gather_rms_norm
    own_kernel.main()
