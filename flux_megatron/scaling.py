"""FP8 operands: their scales, and what a call with them must keep to. No kernel is here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MULTIPLE = 16  # elements: whole 16-byte units of a row for TMA, and what cuBLASLt takes
BLOCK = 128  # elements along K that share a scale, in w as many rows too, of blockwise scales
PADDING = 4  # the multiple to which rows of scales are padded, as cuBLASLt has it


class Scaling(NamedTuple):
    """What turns the sums of FP8 products into the result: real value = stored value * scale.

    The scales are float32 tensors of one element on the device of the operands, so that the host
    never waits for them; `blockwise`, of the shapes of `block_shapes`. A caller may have left one
    out: nothing reads them before `error` has. `wire`: `hopper` sends partial sums in e4m3, with a
    scale a tile.
    """

    x: Tensor
    w: Tensor
    out_dtype: torch.dtype
    split_accumulator: bool
    blockwise: bool = False
    wire: bool = False

    @property
    def facts(self) -> tuple:
        """All that `error` reads."""
        scales = [
            (type(one), one.layout, one.shape, one.dtype, one.device)
            if isinstance(one, Tensor)
            else type(one)
            for one in (self.x, self.w)
        ]
        return (*scales, *self[2:])

    @property
    def kind(self) -> Any:
        """All but the tensors: what kernels are compiled for."""
        return self._replace(x=None, w=None)  # type: ignore[arg-type]


def scaling_of(
    x_scale: Tensor | None, w_scale: Tensor | None, out_dtype: torch.dtype | None, split: bool
) -> Scaling | None:
    """None for a call that names nothing of FP8. `error` says what one lacks that does."""
    if x_scale is None and w_scale is None and out_dtype is None and not split:
        return None
    blockwise = all(isinstance(one, Tensor) and one.numel() > 1 for one in (x_scale, w_scale))
    dtype, split = out_dtype or torch.bfloat16, split or blockwise
    return Scaling(x_scale, w_scale, dtype, split, blockwise)  # type: ignore[arg-type]


def block_shapes(rows: int, N: int, K: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the blockwise scales of x [rows, K] and of w [N, K], as TransformerEngine makes them. x
    has one for each row and BLOCK elements of K. They are stored transposed, so that those of the
    rows of a tile are neighbours. w has one for each BLOCK x BLOCK.
    """
    blocks = -(-K // BLOCK)
    return (blocks, _padded(rows)), (-(-N // BLOCK), _padded(blocks))


def _padded(count: int) -> int:
    return -(-count // PADDING) * PADDING


def dequantized(x: Tensor, w: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """The real values in fp32, of operands with blockwise scales."""
    (rows, K), N = x.shape, len(w)
    of_x = scaling.x[:, :rows].t().repeat_interleave(BLOCK, 1)[:, :K]
    of_w = scaling.w.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:N, :K]
    return x.float() * of_x, w.float() * of_w


def scales_of(matrices: Tensor, K: int, rows: int) -> Tensor:
    """The blockwise scales of one GEMM's x: of so many rows of each matrix of them, one behind
    another. A copy where there are several: cuBLASLt takes no scales with gaps.
    """
    blocks, pitch = -(-K // BLOCK), matrices.shape[1]
    shape = blocks, matrices.shape[0] // blocks, rows
    return matrices.as_strided(shape, (pitch, blocks * pitch, 1)).flatten(1)


def is_fp8(tensor: Any) -> bool:
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
    shapes: Any = (None, None)
    if scaling.blockwise:
        shapes = block_shapes(len(x), *w.shape)
    for name, scale, shape in zip(("x_scale", "w_scale"), scaling[:2], shapes, strict=True):
        if reason := _scale_error(scale, x.device, shape):
            wanted = "of one element" if shape is None else f"{list(shape)}"
            return f"{name} {reason} given, a float32 tensor {wanted} on {x.device} expected"
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


def _scale_error(
    scale: Tensor | None, device: torch.device, shape: tuple[int, int] | None
) -> str | None:
    """What was given in place of a scale, or None. `shape` None: of any with one element."""
    if scale is None or not isinstance(scale, Tensor):
        return repr(scale)
    if type(scale) not in (Tensor, Parameter) or scale.layout is not torch.strided:
        return f"of the type {type(scale).__qualname__} and the layout {scale.layout}"
    fits = scale.numel() == 1 if shape is None else scale.shape == shape
    if not fits or scale.dtype is not torch.float32 or scale.device != device:
        return f"{list(scale.shape)} {str(scale.dtype)[6:]} on {scale.device}"
    return None
