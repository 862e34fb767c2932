"""The library's GEMM: as a step of a program, of FP8 with its scales too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flux_megatron.scaling import BLOCK, E4M3, PADDING, Scaling, dequantized, scales_of
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.steps import Slot


def multiply(
    p: CallProgram, x: Slot, *, out: Slot, bias: Slot | None = None, x_scale: Slot | None = None,
    rows: slice | None = None,
) -> None:  # fmt: skip
    """FP8: `x_scale` are the blockwise scales of x, where others than this call's; `rows` are those
    of x, where it is not all of this call's.
    """
    with p.phase("gemm chunk"):
        if p.scaling is None:
            p.torch(_gemm_nt if p.layout == "nt" else _gemm, x, p.w, out)
            return
        x_scale = p.scaling.x if x_scale is None else x_scale
        gemm = _of_call(p, x, x_scale, rows)
        given: Any = x, p.w, x_scale, p.scaling.w, out, bias
        p.torch(gemm, *(one for one in given if one is not None))


def _of_call(p: CallProgram, x: Slot, x_scale: Slot, rows: slice | None) -> Callable[..., Tensor]:
    """`scaled_gemm_of`, which picks the scales of x from these."""
    gemm = scaled_gemm_of(x, p.scaling)
    if p.scaling.blockwise and rows is not None:
        first, count = rows.start, len(x)
        return lambda x, w, of_x, *more: gemm(x, w, of_x.narrow_copy(1, first, count), *more)
    if x_scale is not p.scaling.x and len(x_scale) > len(p.scaling.x):
        K, M_shard = p.x.shape[1], len(p.x)
        return lambda x, w, of_x, *more: gemm(x, w, scales_of(of_x, K, M_shard), *more)
    return gemm


def transpose(p: CallProgram) -> None:
    """What every scaled GEMM of a call reads, as `scaled_gemm_of` takes it: once, before them."""
    if p.scaling is not None:
        p.transpose(p.w, *((p.scaling.w,) if p.scaling.blockwise else ()))


def _gemm_nt(x: Tensor, w: Tensor, out: Tensor) -> None:
    torch.mm(x, w.t(), out=out)


def _gemm(x: Tensor, w: Tensor, out: Tensor) -> None:
    torch.mm(x, w, out=out)


def scaled_gemm(x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """x @ w.t() * scales + bias, rounded once, by the library where it has FP8."""
    of_w = scaling.w.t() if scaling.blockwise else scaling.w
    return scaled_gemm_of(x, scaling)(x, w.t(), scaling.x, of_w, None, bias)


def scaled_gemm_of(x: Any, scaling: Scaling) -> Callable[..., Tensor]:
    """The same, for x of this shape. It takes x, w.t(), the scales of both, those of w's blocks
    transposed as w is, where the result goes, and the bias.
    """
    return partial(_by_library if _in_library(x, scaling) else _by_real_values, scaling)


def _by_library(
    scaling: Scaling, x: Tensor, right: Tensor, of_x: Tensor, of_w: Tensor,
    out: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _, _, dtype, split, blockwise, _ = scaling
    if blockwise:
        blocks = of_x.shape[0]
        of_x, of_w = of_x.t(), of_w if of_w.shape[0] == blocks else of_w[:blocks]
    else:
        of_x, of_w = of_x.reshape(()), of_w.reshape(())
    inside = None if dtype is torch.float32 else bias  # the library adds none in fp32
    y = torch._scaled_mm(
        x, right, of_x, of_w, bias=inside, out_dtype=dtype, use_fast_accum=not split, out=out
    )
    return y if inside is bias else y.add_(bias)  # type: ignore[arg-type]


def _by_real_values(
    scaling: Scaling, x: Tensor, right: Tensor, of_x: Tensor, of_w: Tensor,
    out: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if scaling.blockwise:
        real_x, real_w = dequantized(x, right.t(), scaling._replace(x=of_x, w=of_w.t()))
        y = torch.mm(real_x, real_w.t())
    else:
        y = torch.mm(x.float(), right.float()) * (of_x.reshape(()) * of_w.reshape(()))
    y = (y if bias is None else y + bias.float()).to(scaling.out_dtype)
    return y if out is None else out.copy_(y)


def _in_library(x: Any, scaling: Scaling) -> bool:
    if x.device.type != "cuda":
        return False
    if scaling.blockwise:
        return blocks_refused(x.device, *x.shape) is None
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def blocks_refused(device: torch.device, rows: int, K: int) -> str | None:
    """Why the library has no GEMM of so many rows with blockwise scales, or None. A CPU has none,
    and makes such GEMMs of real values.
    """
    if device.type == "cpu":
        return None
    if rows % PADDING:
        return f"{rows} rows in a GEMM with blockwise scales, a multiple of {PADDING} expected"
    blocks = -(-K // BLOCK)
    return _refusal(device, 1 if blocks % PADDING else PADDING)


@cache
def _refusal(device: torch.device, blocks: int) -> str | None:
    """Of the library itself, with so many blocks of K: some versions of torch know no padding."""
    scaling = Scaling(
        torch.ones(blocks, BLOCK, device=device), torch.ones(2, PADDING, device=device),
        torch.bfloat16, True, True,
    )  # fmt: skip
    x, w = (torch.ones(n, blocks * BLOCK, device=device).to(E4M3) for n in (BLOCK, 2 * BLOCK))
    try:
        _by_library(scaling, x, w.t(), scaling.x, scaling.w.t())
    except torch.OutOfMemoryError:  # of this rank alone, today
        raise
    except (RuntimeError, ValueError) as error:
        return (
            f"this torch and GPU have no GEMM with blockwise scales: {str(error).splitlines()[0]}"
        )
    return None
