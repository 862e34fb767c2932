"""What all launchers share: which problems the kernels take, the size of a persistent grid, the
call itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton

from flux_megatron.problem import Problem, Tile

DTYPES = ("float32", "bfloat16", "float16")


def supports(problem: Problem) -> str | None:
    """Why the fused kernels cannot run the problem in this process, or None."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is none of {', '.join(DTYPES)}"
    interpreted = triton.knobs.runtime.interpret
    if problem.device == "cpu" and not interpreted:
        return "CPU tensors need TRITON_INTERPRET=1, set before triton is imported"
    if problem.device != "cpu" and interpreted:
        return "TRITON_INTERPRET=1 is set, which copies CUDA tensors instead of sharing them"
    return None


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def persistent_grid(device: torch.device, tiles: int) -> tuple[int]:
    """One program a multiprocessor, so that all are resident; interpreted programs run one after
    another anyway.
    """
    return (1,) if device.type == "cpu" else (min(_multiprocessors(device), tiles),)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def without_tma_if_unaligned(tile: Tile, N: int, *operands: torch.Tensor) -> Tile:
    """The tile, without TMA where rows of an operand, or of a result with N columns, are not whole
    16-byte units: the hardware would not say so, but copy other bytes.
    """
    unit = 16 // operands[0].element_size()
    aligned = N % unit == 0 and all(t.shape[1] % unit == 0 for t in operands)
    if not tile.tma or (aligned and all(t.data_ptr() % 16 == 0 for t in operands)):
        return tile
    return replace(tile, tma=False)


def run(kernel, grid: tuple[int, ...], tile: Tile, *args, **constexprs) -> None:
    """Launch `kernel`; the tile's sizes go to the constexprs of the same names that the kernel
    has.
    """
    sizes = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "TMA": tile.tma,
    }
    constexprs.update((name, size) for name, size in sizes.items() if name in kernel.arg_names)
    if tile.tma:
        # per thread, and autograd runs backward in threads of its own: set it where it is used
        triton.set_allocator(_descriptor_memory)
    kernel[grid](*args, **constexprs, num_warps=tile.num_warps, num_stages=tile.num_stages)
