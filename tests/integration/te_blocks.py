"""Blockwise FP8 as TransformerEngine has it, for the stand-in `te_modules`: 1 x 128 elements have a
scale, of weights 128 x 128; scales are stored transposed, and so is what is quantized along rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def _in_blocks(tensor: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Quantized values of a matrix in blocks of `side` x 128, and the powers of two they lack, one
    for each block.
    """
    rows, columns = tensor.shape
    whole = pad(tensor, (0, -columns % 128, 0, -rows % side))
    blocks = whole.view(len(whole) // side, side, whole.shape[1] // 128, 128)
    largest = blocks.abs().amax((1, 3)).clamp(min=2.0**-20)
    scale = (largest / 256).log2().ceil().exp2()
    return (blocks / scale[:, None, :, None]).view(whole.shape)[:rows, :columns], scale


class Float8BlockwiseQTensorStorage:
    def __init__(
        self, rowwise_data: Any, rowwise_scale_inv: Any, columnwise_data: Any,
        columnwise_scale_inv: Any, fp8_dtype: Any, quantizer: Any, is_2D_scaled: bool,
    ) -> None:  # fmt: skip
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, self._quantizer, self._is_2D_scaled = fp8_dtype, quantizer, is_2D_scaled

    def size(self) -> torch.Size:
        if self._rowwise_data is not None:
            return self._rowwise_data.size()
        return torch.Size([*self._columnwise_data.shape[1:], len(self._columnwise_data)])

    def update_usage(self, columnwise_usage: bool) -> None:
        assert self._columnwise_data is not None, "Cannot update to rowwise and columnwise usage."

    def values(self, transposed: bool) -> Tensor:
        """As the GEMM reads it: what is quantized along K."""
        data, scale = self._rowwise_data, self._rowwise_scale_inv
        if transposed:
            data, scale = self._columnwise_data, self._columnwise_scale_inv
        flat = data.contiguous().view(self._quantizer.torch_dtype).float().flatten(0, -2)
        if transposed and data.dim() > 2:  # [K, rows of each sample]
            flat = data.contiguous().view(self._quantizer.torch_dtype).float().flatten(1)
        rows, columns = flat.shape
        if self._is_2D_scaled:
            scale = scale[:, : columns // 128].repeat_interleave(128, 0)
        else:
            scale = scale.t()[:rows]
        real = flat * scale.repeat_interleave(128, 1)
        return real.t() if transposed else real


class Weight(torch.Tensor):
    """One that is FP8 itself. Only what autograd and a module ask of it can be done."""

    @staticmethod
    def __new__(cls, stored: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, stored.size(), dtype=torch.float32)

    def __init__(self, stored: Any) -> None:
        self.__dict__.update(stored.__dict__)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{func} of a weight in FP8")
        return cls(args[0])


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, Weight):
    def __init__(self, stored: Any) -> None:
        Weight.__init__(self, stored)

    def change(self, values: Tensor) -> None:
        """As an optimizer's step does it, in place; what lies along rows is made anew."""
        for name, fresh in self._quantizer(values).__dict__.items():
            if isinstance(fresh, Tensor):
                getattr(self, name).copy_(fresh)


class Float8BlockQuantizer:
    def __init__(self, fp8_dtype: Any, torch_dtype: torch.dtype, block_scaling_dim: int) -> None:
        self.dtype, self.torch_dtype, self.block_scaling_dim = (
            fp8_dtype, torch_dtype, block_scaling_dim,
        )  # fmt: skip
        self.rowwise_usage = self.columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> Float8BlockQuantizer:
        made = Float8BlockQuantizer(self.dtype, self.torch_dtype, self.block_scaling_dim)
        made.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return made

    def is_quantizable(self, tensor: Any) -> bool:
        size = tensor.size()
        return size[-1] % 128 == 0 and size[:-1].numel() % 128 == 0

    def __call__(self, tensor: Tensor) -> Float8BlockwiseQTensorStorage:
        rows = tensor.detach().flatten(0, -2)
        along_k = self._quantized(rows) if self.rowwise_usage else (None, None)
        along_m = self._quantized(rows.t().contiguous()) if self.columnwise_usage else (None, None)
        if along_k[0] is not None:
            along_k = along_k[0].view(tensor.shape), along_k[1]
        return Float8BlockwiseQTensorStorage(
            *along_k, *along_m, self.dtype, self.copy(), self.block_scaling_dim == 2
        )

    def _quantized(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = _in_blocks(matrix, 128 if self.block_scaling_dim == 2 else 1)
        scale = scale if self.block_scaling_dim == 2 else scale.t()
        padded = pad(scale, (0, -scale.shape[1] % 4)).contiguous()
        return values.to(self.torch_dtype).view(torch.uint8), padded


def gather_blocks(local: Any, group: Any, quantizer: Any) -> Float8BlockwiseQTensorStorage:
    """What the quantizer would make of all rows, of what it made of each rank's."""
    along_k: tuple = (None, None)
    along_m: tuple = (None, None)
    if quantizer.rowwise_usage:
        scales = _shards(local._rowwise_scale_inv, group)
        along_k = _shards(local._rowwise_data, group).flatten(0, 1), _side_by_side(scales)
    if quantizer.columnwise_usage:
        data = _shards(local._columnwise_data, group)
        along_m = _side_by_side(data), _shards(local._columnwise_scale_inv, group).flatten(0, 1)
    return Float8BlockwiseQTensorStorage(
        *along_k, *along_m, local._fp8_dtype, quantizer.copy(), False
    )


def _shards(shard: Tensor, group: Any) -> Tensor:
    whole = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    return whole.view(group.size(), *shard.shape)


def _side_by_side(shards: Tensor) -> Tensor:
    return shards.transpose(0, 1).flatten(1).contiguous()
