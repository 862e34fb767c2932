"""FP8 operands: their scales, and what a call with them must keep to. No kernel is here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MULTIPLE = 16  # elements: whole 16-byte units of a row for TMA, and what cuBLASLt takes


class Scaling(NamedTuple):
    """What turns the sums of FP8 products into the result: real value = stored value * scale.

    The scales are float32 tensors of one element on the device of the operands, so that the host
    never waits for them. A caller may have left one out: nothing reads them before `error` has.
    """

    x: Tensor
    w: Tensor
    out_dtype: torch.dtype
    split_accumulator: bool

    @property
    def facts(self) -> tuple:
        """All that `error` reads."""
        scales = [
            (type(one), one.layout, one.shape, one.dtype, one.device)
            if isinstance(one, Tensor)
            else type(one)
            for one in (self.x, self.w)
        ]
        return (*scales, self.out_dtype, self.split_accumulator)

    def product(self) -> Tensor:
        return self.x.reshape(()) * self.w.reshape(())


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in (E4M3, E5M2)


def result_dtype(x: Any, scaling: Scaling | None) -> torch.dtype:
    return scaling.out_dtype if scaling else x.dtype


def scales_or(unused: Any, scaling: Scaling | None) -> tuple[Any, Any]:
    """The scales, tensors or slots, or what a kernel without them gets in their place."""
    return (scaling.x, scaling.w) if scaling else (unused, unused)


def error(x: Tensor, w: Tensor, scaling: Scaling | None, layout: str) -> str | None:
    """What is wrong with the FP8 part of a call on matrices of one device, or None."""
    dtypes = f"x {str(x.dtype)[6:]} and w {str(w.dtype)[6:]} given"
    if scaling is None:
        if is_fp8(x) or is_fp8(w):
            return (
                f"{dtypes} without scales, x_scale and w_scale of all_gather_gemm or "
                "gemm_reduce_scatter expected"
            )
        return None
    if not is_fp8(x) or w.dtype is not E4M3:
        return (
            f"{dtypes} with x_scale, w_scale, out_dtype or split_accumulator, x float8_e4m3fn or "
            "float8_e5m2 and w float8_e4m3fn expected"
        )
    for name, scale in (("x_scale", scaling.x), ("w_scale", scaling.w)):
        if reason := _scale_error(scale, x.device):
            return f"{name} {reason} given, a float32 tensor of one element on {x.device} expected"
    if scaling.out_dtype not in OUT_DTYPES:
        return f"out_dtype {scaling.out_dtype} given, one of {[*OUT_DTYPES]} expected"
    if layout != "nt":
        return (
            f"layout {layout!r} given for {dtypes.removesuffix(' given')}, 'nt' expected: FP8 "
            "operands lie along K, so pass the cached transpose of w as [N, K]"
        )
    N, K = w.shape
    if N % MULTIPLE or K % MULTIPLE:
        return f"w with N {N} and K {K} on this rank given, multiples of {MULTIPLE} expected"
    return None


def _scale_error(scale: Tensor | None, device: torch.device) -> str | None:
    """What was given in place of a scale, or None."""
    if scale is None or not isinstance(scale, Tensor):
        return repr(scale)
    if type(scale) not in (Tensor, Parameter) or scale.layout is not torch.strided:
        return f"of the type {type(scale).__qualname__} and the layout {scale.layout}"
    if scale.numel() != 1 or scale.dtype is not torch.float32 or scale.device != device:
        return f"{list(scale.shape)} {str(scale.dtype)[6:]} on {scale.device}"
    return None
