"""Whether an SM has the shared memory that a tile of a portable kernel needs.

Triton says so when it loads the kernel: that is in the middle of a call, for which other ranks wait
already. A plan is asked before it is chosen.
"""

from __future__ import annotations

from functools import cache

import torch

from flux_megatron.kernels.hopper.config import BARRIERS_BYTES, SHARED_BYTES
from flux_megatron.problem import Problem, Tile

MMA_SYNC_ROWS = 32  # up to which Triton multiplies by mma.sync, with operands from registers
HOPPER = 9  # of compute capabilities the first number
_FROM_SHARED = (HOPPER, 10)  # whose MMAs take operands from shared memory


def stages_bytes(tile: Tile, itemsize: int, capability: int) -> int:
    """What the stages of a tile need. Triton keeps one stage less than it counts where MMAs read
    registers.
    """
    by_registers = tile.block_m <= MMA_SYNC_ROWS or itemsize == 4 or capability not in _FROM_SHARED
    stages = max(1, tile.num_stages - by_registers)
    return stages * (tile.block_m + tile.block_n) * tile.block_k * itemsize


def refuses(problem: Problem, tile: Tile, stores_by_tma: bool) -> str | None:
    """Why this GPU has not the memory for a tile of the problem, or None. Before Triton 3.8 a store
    by TMA has memory beside the stages.
    """
    if problem.device == "cpu":
        return None
    operands, result = (
        getattr(torch, name).itemsize
        for name in (problem.dtype, problem.out_dtype or problem.dtype)
    )
    capability, most = _of_this_gpu()
    needed = stages_bytes(tile, operands, capability)
    if tile.tma:
        staged = tile.block_m * tile.block_n * result if stores_by_tma else 0
        needed += staged + BARRIERS_BYTES
    if needed <= most:
        return None
    shape = f"{tile.block_m} x {tile.block_n} x {tile.block_k} in {tile.num_stages} stages"
    return f"a tile of {shape} needs {needed} bytes of shared memory, an SM has {most}"


@cache
def _of_this_gpu() -> tuple[int, int]:
    """Its compute capability, and the most memory that a CTA may have; those of Hopper where there
    is no GPU.
    """
    if not torch.cuda.is_available():
        return HOPPER, SHARED_BYTES
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # not every build of torch says it
    return properties.major, getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)
