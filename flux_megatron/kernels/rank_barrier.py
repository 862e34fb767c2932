"""The rank barrier at the beginning of a captured call: no rank goes on before all have entered.

A replay repeats the number of its call, so signals of the replay before it would look like its own.
Therefore each rank resets its slots first. Its entry then permits the others to raise them again.
One CTA signals, then waits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    count_relaxed_gpu,
    deadline_after,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.problem import Tile


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


@lru_cache(maxsize=64)
def _launcher(world_size: int, device: torch.device) -> Launcher:
    slots = world_size * MAX_COMM_TILES.value
    one_warp = Tile(num_warps=1, num_stages=1)
    return Launcher(
        rank_barrier_kernel, (1,), one_warp, WORLD_SIZE=world_size, BLOCK=next_power_of_2(slots)
    )


def rank_barrier(
    *, pad: Tensor, pad_pointers: Tensor, entries: Tensor, status: Tensor,
    rank: int, world_size: int, timeout_ns: int,
) -> None:  # fmt: skip
    """Reset this rank's slots in `pad`, count an entry in `entries` [1], and wait for the entry of
    every other rank. `pad_pointers` [R] has the addresses of all ranks' pads.
    """
    run = _launcher(world_size, pad.device)
    run((pad, pad_pointers, entries, status), (rank, timeout_ns))
