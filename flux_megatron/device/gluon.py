"""`device.triton` for Gluon kernels on GPUs of compute capability 9: the same names and arguments,
and most of the same functions. Triton's interpreter does not run Gluon.

All warps of the CTA call them; `kernels/hopper/gemm_rs.py` shows how partitions of warps share this
work. `wait_tile` also orders TMA loads. `draw_tile` answers all warps at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.device.triton import (
    count_tile,
    deadline_after,
    draw_tile,
    peer_pointer,
    put_tile,
    signal_tile,
)
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    complete_tma_stores,
    wait_acquire_sys,
)

__all__ = [
    "close_draws",
    "complete_tma_stores",
    "count_tile",
    "deadline_after",
    "draw_tile",
    "peer_pointer",
    "put_tile",
    "rank_barrier",
    "signal_tile",
    "wait_tile",
]


@gluon.jit
def wait_tile(pads, rank, source, slot, epoch, deadline, status):
    """Wait until rank `source` has signalled `slot` to this `rank` in this call, or the deadline
    has passed.
    """
    pad = peer_pointer(pads, rank, gl.int32)
    wait_acquire_sys(pad, source * MAX_COMM_TILES + slot, epoch, deadline, status)  # wait [K]


@gluon.jit
def rank_barrier(pads, rank, slot, epoch, deadline, status, WORLD_SIZE: gl.constexpr):
    """No rank goes on before all have come. Once a call for each slot, which nothing else uses."""
    for step in range(1, WORLD_SIZE):
        signal_tile(pads, (rank + step) % WORLD_SIZE, rank, slot, epoch)
    for step in range(1, WORLD_SIZE):
        wait_tile(pads, rank, (rank + step) % WORLD_SIZE, slot, epoch, deadline, status)


@gluon.jit
def close_draws(tile, tiles, work):
    """The last draw in vain, one of every CTA, clears the counter for the next launch."""
    if tile == tiles + gl.num_programs(0) - 1:
        gl.store(work, 0)
