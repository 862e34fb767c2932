"""What an own Triton kernel calls to send and await data. Memory order is that of
`kernels.primitives`, which these functions name for the tables of `Call.arguments`.

| function | what it does, and what it orders |
| --- | --- |
| `deadline_after(timeout_ns)` | when waits of this kernel give up |
| `peer_pointer(buffers, peer, dtype)` | a peer's buffer, or the own one, as a pointer |
| `put_tile(buffers, peer, at, tile, mask)` | stores a tile into a peer's buffer; orders nothing |
| `count_tile(counters, peer, slot, arrivals)` | true for the CTA that comes last of `arrivals`: \
its signal covers the stores of all |
| `signal_tile(pads, peer, rank, slot, epoch)` | all that this CTA has stored or counted, then the \
signal (release, system) |
| `wait_tile(pads, rank, source, slot, epoch, deadline, status)` | the signal of `source`, then \
all later loads of this CTA (acquire, system); bounded |
| `rank_barrier(pads, rank, slot, epoch, deadline, status, WORLD_SIZE)` | what one CTA of \
every rank has stored, then what these CTAs load |
| `draw_tile(work)`, `close_draws(tile, tiles, work)` | which CTA makes which tile; order nothing |
| `complete_tma_stores()` | TMA stores are in memory: between `desc.store` and a count or signal |
| `acquire_for_tma_loads()` | between a wait and `desc.load` |

A slot is 0 to SLOTS - 1. A wait that runs out of time is recorded, and the kernel goes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.portable.tile_draws import close_draws
from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    acquire_for_tma_loads,
    complete_tma_stores,
    count_acq_rel_gpu,
    count_relaxed_gpu,
    deadline_after,
    signal_release_sys,
    wait_acquire_sys,
)

__all__ = [
    "acquire_for_tma_loads",
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


@triton.jit
def peer_pointer(buffers, peer, dtype: tl.constexpr):
    """The buffer of rank `peer` as a pointer to `dtype`: 16-byte aligned, so that rows are moved by
    whole vectors.
    """
    return tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(dtype)), 16)


@triton.jit
def put_tile(buffers, peer, at, tile, mask=None):
    """Store `tile` at the elements `at` of rank `peer`'s buffer, seen there after a signal."""
    tl.store(peer_pointer(buffers, peer, tile.dtype) + at, tile, mask=mask)


@triton.jit
def count_tile(counters, peer, slot, arrivals):
    """Count one of the `arrivals` tiles that a signal in `slot` of `peer` announces; true for the
    last one, which has to signal. The counter is 0 again then.
    """
    return count_acq_rel_gpu(counters + peer * MAX_COMM_TILES + slot, arrivals)


@triton.jit
def signal_tile(pads, peer, rank, slot, epoch):
    """Announce to `peer`, in `slot` of this `rank`, what this CTA has put there or counted."""
    pad = peer_pointer(pads, peer, tl.int32)
    signal_release_sys(pad, rank * MAX_COMM_TILES + slot, epoch)  # signal [K]


@triton.jit
def wait_tile(pads, rank, source, slot, epoch, deadline, status):
    """Wait until rank `source` has signalled `slot` to this `rank` in this call, or the deadline
    has passed.
    """
    pad = peer_pointer(pads, rank, tl.int32)
    wait_acquire_sys(pad, source * MAX_COMM_TILES + slot, epoch, deadline, status)  # wait [K]


@triton.jit
def rank_barrier(pads, rank, slot, epoch, deadline, status, WORLD_SIZE: tl.constexpr):
    """No rank goes on before all have come. Once a call for each slot, which nothing else uses."""
    for step in range(1, WORLD_SIZE):
        signal_tile(pads, (rank + step) % WORLD_SIZE, rank, slot, epoch)
    for step in range(1, WORLD_SIZE):
        wait_tile(pads, rank, (rank + step) % WORLD_SIZE, slot, epoch, deadline, status)


@triton.jit
def draw_tile(work):
    """The number of the next tile: 0, 1, 2, ... over all CTAs of the launch."""
    return count_relaxed_gpu(work) - 1
