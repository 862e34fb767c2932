"""The rank barrier at the beginning of a captured call: no rank goes on before all have entered.

A replay repeats the number of its call, so signals of the replay before it would look like its own.
Therefore each rank resets its slots first. Its entry then permits the others to raise them again.
One CTA signals, then waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    count_relaxed_gpu,
    deadline_after,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm.channel import Call


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def rank_barrier_kernel(
    pad, pad_pointers, entries, status, rank, timeout_ns: tl.int64,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    first_entry = WORLD_SIZE * MAX_COMM_TILES
    slots = tl.arange(0, BLOCK)
    tl.store(pad + slots, 0, mask=slots < first_entry)
    entry = count_relaxed_gpu(entries)
    for step in range(1, WORLD_SIZE):
        theirs = tl.load(pad_pointers + (rank + step) % WORLD_SIZE).to(entries.dtype)
        signal_release_sys(theirs, first_entry + rank, entry)  # signal [E]
    for step in range(1, WORLD_SIZE):
        source = (rank + step) % WORLD_SIZE
        wait_acquire_sys(pad, first_entry + source, entry, deadline, status)  # wait [E]


def rank_barrier(call: Call) -> None:
    """Reset this rank's slots, count an entry, and wait for the entry of every other rank."""
    region = call.region
    launch_kernel(
        rank_barrier_kernel, (1,), Tile(num_warps=1, num_stages=1),
        (region.own_pad, region.pad_pointers, region.entries, call.status),
        (region.rank, call.channel.timeout_ns),
        WORLD_SIZE=region.world_size,
        BLOCK=next_power_of_2(region.world_size * MAX_COMM_TILES.value),
    )  # fmt: skip
