"""`device.triton` for Gluon kernels on GPUs of compute capability 9: the same names and arguments,
on `kernels.hopper_primitives`. Triton's interpreter does not run Gluon.

All warps of the CTA call them; `kernels/hopper_gemm_rs.py` shows how partitions of warps share this
work. `wait_tile` also orders TMA loads. `draw_tile` answers all warps at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import barrier
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    complete_tma_stores,
    count_acq_rel_gpu,
    count_relaxed_gpu,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.kernels.primitives import time_ns

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
def deadline_after(timeout_ns):
    """When waits of this kernel give up."""
    return time_ns() + timeout_ns


@gluon.jit
def peer_pointer(buffers, peer, dtype: gl.constexpr):
    """The buffer of rank `peer` as a pointer to `dtype`, 16-byte aligned."""
    return gl.multiple_of(gl.load(buffers + peer).to(gl.pointer_type(dtype)), 16)


@gluon.jit
def put_tile(buffers, peer, at, tile, mask=None):
    """Store `tile` at the elements `at`, of its layout, of rank `peer`'s buffer."""
    gl.store(peer_pointer(buffers, peer, tile.dtype) + at, tile, mask=mask)


@gluon.jit
def count_tile(counters, peer, slot, arrivals):
    """Count one of the `arrivals` tiles of a slot; true for the last one, which has to signal."""
    barrier()  # one thread counts: the stores of the others must have been issued
    return count_acq_rel_gpu(counters + peer * MAX_COMM_TILES + slot, arrivals)


@gluon.jit
def signal_tile(pads, peer, rank, slot, epoch):
    """Announce to `peer`, in `slot` of this `rank`, what this CTA has put there or counted."""
    pad = peer_pointer(pads, peer, gl.int32)
    signal_release_sys(pad, rank * MAX_COMM_TILES + slot, epoch)  # signal [K]


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
def draw_tile(work):
    """The number of the next tile: 0, 1, 2, ... over all CTAs of the launch."""
    return count_relaxed_gpu(work) - 1


@gluon.jit
def close_draws(tile, tiles, work):
    """The last draw in vain, one of every CTA, clears the counter for the next launch."""
    if tile == tiles + gl.num_programs(0) - 1:
        gl.store(work, 0)
