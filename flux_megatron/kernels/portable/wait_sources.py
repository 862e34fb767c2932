"""A wait as a kernel, for strategies with library GEMMs: one CTA that returns when rows have
arrived.

A stream wait by the driver would cost less, but it has no deadline.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import deadline_after, wait_rows
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm.program import Memory, Number


# no number compiles a kernel of its own
@triton.jit(
    do_not_specialize=[
        "first_source", "count", "epoch", "timeout_ns", "comm_rows", "M_shard", "world_size",
    ]
)  # fmt: skip
def wait_sources_kernel(
    pad, status, first_source, count, epoch, timeout_ns: tl.int64, comm_rows, M_shard, world_size
):
    deadline = deadline_after(timeout_ns)
    for step in range(0, count):
        source = (first_source + step) % world_size
        wait_rows(pad, source, 0, M_shard - 1, comm_rows, epoch, deadline, status)  # wait [A]


def wait_sources(
    *, pad: Memory, status: Memory, first_source: int, count: int, world_size: int,
    epoch: Number, timeout_ns: int, M_shard: int, comm_rows: int,
) -> None:  # fmt: skip
    """Order the current stream after the shards of `count` ranks from `first_source` on, around
    the ring.
    """
    launch_kernel(
        wait_sources_kernel, (1,), Tile(num_warps=1, num_stages=1), (pad, status),
        (first_source, count, epoch, timeout_ns, comm_rows, M_shard, world_size),
    )  # fmt: skip
