"""A wait of its own, for strategies whose GEMM is a library's: one program that returns when rows
have arrived.

A stream wait by the driver would do the same for less, but it cannot be bounded.
"""

from __future__ import annotations

import triton
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.primitives import deadline_after, wait_rows
from flux_megatron.problem import Tile


@triton.jit(do_not_specialize=["first_source", "count", "epoch", "timeout_ns", "comm_rows"])
def wait_sources_kernel(
    pad, status, first_source, count, world_size, epoch, timeout_ns, M_shard, comm_rows
):
    deadline = deadline_after(timeout_ns)
    for step in range(0, count):
        source = (first_source + step) % world_size
        wait_rows(pad, source, 0, M_shard - 1, comm_rows, epoch, deadline, status)  # wait [A]


def wait_sources(
    *, pad: Tensor, status: Tensor, first_source: int, count: int, world_size: int,
    epoch: int, timeout_ns: int, M_shard: int, comm_rows: int,
) -> None:  # fmt: skip
    """Order the current stream after the shards of `count` ranks from `first_source` on, around
    the ring.
    """
    launch.run(
        wait_sources_kernel, (1,), Tile(num_warps=1, num_stages=1),
        pad, status, first_source, count, world_size, epoch, timeout_ns, M_shard, comm_rows,
    )  # fmt: skip
