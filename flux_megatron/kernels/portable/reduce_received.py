"""The last step of GEMM+RS: the sum over ranks of the partial results in a rank's receive buffer.

The sum is fp32, in rank order, rounded once. So it is deterministic, in whatever order the ranks
arrive. A CTA waits [B] for the communication tiles of its rows and for nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import deadline_after, wait_rows
from flux_megatron.kernels.sizes import next_power_of_2, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm.program import Memory, Number


# numbers that change from call to call must not compile new kernels
@triton.jit(do_not_specialize=["epoch", "timeout_ns", "comm_rows", "M_shard"])
def reduce_received_kernel(
    received, y, pad, status, epoch, timeout_ns: tl.int64, comm_rows, M_shard, N,
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
        wait_rows(pad, source, row, last_row, comm_rows, epoch, deadline, status)  # wait [B]
        block = received + tl.cast(source, tl.int64) * M_shard * N
        acc += tl.load(block + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets, acc.to(y.dtype.element_ty), mask=inside)


def reduce_received(
    received: Memory, *, pad: Memory, status: Memory, epoch: Number, timeout_ns: int,
    comm_rows: int,
) -> Memory:  # fmt: skip
    """received [R, M_shard, N], a block of each rank  ->  their sum [M_shard, N]."""
    world_size, M_shard, N = received.shape
    y = received.new_empty(M_shard, N)
    # 16 rows of 256 columns give each of 8 warps 16-byte loads; on CPU few large tiles are cheaper
    # than many
    block_m, block_n = (64, 512) if received.device.type == "cpu" else (16, 256)
    tile = Tile(min(block_m, next_power_of_2(M_shard)), min(block_n, next_power_of_2(N)))
    launch_kernel(
        reduce_received_kernel, (tiles_of_shard(M_shard, N, tile),), tile,
        (received, y, pad, status), (epoch, timeout_ns, comm_rows, M_shard), (N,),
        WORLD_SIZE=world_size,
    )  # fmt: skip
    return y
