"""The last step of GEMM+RS: the sum over ranks of the partial results in a rank's slots.

fp32, in rank order, rounded once: deterministic, and the same whichever rank was late. Programs
wait [B] for the communication tiles that their rows need and for nothing else.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.primitives import deadline_after, wait_rows
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.kernels.wait_records import wait_begins, wait_ends
from flux_megatron.problem import Tile


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["epoch", "timeout_ns", "comm_rows"])
def reduce_slots_kernel(
    slots, y, pad, status, waits, epoch, timeout_ns: tl.int64, comm_rows, M_shard, N,
    WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    row, col = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
    last_row = tl.minimum(row + BLOCK_M, M_shard) - 1
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = col + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M_shard) & (cols[None, :] < N)
    offsets = rows[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for source in range(0, WORLD_SIZE):
        begin_ns = wait_begins(waits)
        wait_rows(pad, source, row, last_row, comm_rows, epoch, deadline, status)  # wait [B]
        wait_ends(waits, begin_ns, tile, source)
        slot = slots + tl.cast(source, tl.int64) * M_shard * N
        acc += tl.load(slot + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets, acc.to(y.dtype.element_ty), mask=inside)


@lru_cache(maxsize=1024)
def _launcher(
    slots: torch.Size, dtype: torch.dtype, device: torch.device, recorded: bool
) -> Launcher:
    world_size, M_shard, N = slots
    # 16 rows of 256 columns keep 8 warps in 16-byte loads; on CPU few large blocks are cheaper than
    # many
    block_m, block_n = (64, 512) if device.type == "cpu" else (16, 256)
    block_m = min(block_m, next_power_of_2(M_shard))
    block_n = min(block_n, next_power_of_2(N))
    tiles = cdiv(M_shard, block_m) * cdiv(N, block_n)
    return Launcher(
        reduce_slots_kernel, (tiles,), Tile(block_m, block_n), (M_shard, N), WORLD_SIZE=world_size
    )


def reduce_slots(
    slots: Tensor, *, pad: Tensor, status: Tensor, epoch: int, timeout_ns: int, comm_rows: int,
    waits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """slots [R, M_shard, N], one partial result a rank  ->  their sum [M_shard, N].

    `waits` is a buffer of `wait_records`, or None.
    """
    y = slots.new_empty(slots.shape[1:])
    run = _launcher(slots.shape, slots.dtype, slots.device, waits is not None)
    run((slots, y, pad, status, waits), (epoch, timeout_ns, comm_rows))
    return y
