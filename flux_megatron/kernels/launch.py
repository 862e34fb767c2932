"""What all launchers share: which problems the kernels take, the size of a persistent grid, and
where TMA is possible. The launch itself is in `triton_launch`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton

from flux_megatron.kernels import interpreter
from flux_megatron.problem import Problem, Tile
from flux_megatron.symm import copies
from flux_megatron.symm.steps import Slot

DTYPES = ("float32", "bfloat16", "float16")


def supports(problem: Problem) -> str | None:
    """Why the fused kernels cannot run the problem in this process, or None."""
    return supports_tensors(problem.dtype, problem.device)


def supports_tensors(dtype: str | torch.dtype, device: str) -> str | None:
    """The same of tensors of a dtype, or of one of this name, on a kind of device."""
    if (name := str(dtype).removeprefix("torch.")) not in DTYPES:
        return f"dtype {name} is none of {', '.join(DTYPES)}"
    if device == "cpu":
        return interpreter.refuses()
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET=1 is set, which copies CUDA tensors instead of sharing them"
    return None


def supports_scaled(problem: Problem) -> str | None:
    """`supports` of kernels that multiply FP8 too."""
    if problem.blockwise:
        return "our kernels add up no products with blockwise scales"
    if problem.scaled and problem.device == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            given = ".".join(map(str, capability))
            return f"FP8 needs a GPU of compute capability 8.9 or more, this one has {given}"
    return supports_tensors(problem.out_dtype or problem.dtype, problem.device)


@cache
def sms(device: torch.device) -> int:
    """How many SMs the GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def persistent_grid(device: torch.device, tiles: int, spare_sms: int = 0) -> tuple[int]:
    """One CTA an SM, so that all are resident, but for `spare_sms` SMs, or those that copies need;
    interpreted ones run one after another anyway.
    """
    if device.type == "cpu":
        return (1,)
    spare_sms = max(spare_sms, copies.spare_sms(device))
    return (max(1, min(sms(device) - spare_sms, tiles)),)


def has_whole_units(*tensors: torch.Tensor | Slot) -> bool:
    """Whether all addresses are multiples of 16 bytes, which TMA needs. Those of calls are
    (`overlap.operands`).
    """
    return all(isinstance(one, Slot) or one.data_ptr() % 16 == 0 for one in tensors)


def without_tma_if_unaligned(
    tile: Tile, row_sizes: tuple[int, ...], *tensors: torch.Tensor | Slot
) -> Tile:
    """The tile, without TMA unless addresses and rows of `row_sizes` elements are whole 16-byte
    units: the hardware would not say so, but copy other bytes.
    """
    itemsize = tensors[0].dtype.itemsize
    whole = all(size * itemsize % 16 == 0 for size in row_sizes)
    if not tile.tma or (whole and has_whole_units(*tensors)):
        return tile
    return replace(tile, tma=False)
