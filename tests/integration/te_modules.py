"""A stand-in for the modules of TransformerEngine that `integration.te_overlap` reaches into.

It calls what their linear layers call, in their order and with their arguments, on CPU tensors:
FP8 by one power of two a tensor, so that small integers are exact.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from te_blocks import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Weight,
    gather_blocks,
)
from torch import Tensor

CommOverlapType = enum.Enum("CommOverlapType", "RS AG")
DType = enum.Enum("DType", "kFloat8E4M3 kFloat8E5M2")
UserBufferQuantizationMode = enum.Enum("UserBufferQuantizationMode", "NONE FP8")
_TORCH = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def Recipe(kind: str = "current") -> Any:
    """`kind`: "current", "block", or of several scales otherwise, as "mxfp8"."""
    return types.SimpleNamespace(
        delayed=lambda: False, float8_current_scaling=lambda: kind == "current",
        float8_block_scaling=lambda: kind == "block",
    )  # fmt: skip


class FP8GlobalStateManager:
    enabled, recipe = True, Recipe()
    reads_rows = False  # GPUs whose FP8 GEMMs need no transpose

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe


class Float8TensorStorage:
    def __init__(
        self, data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: DType, quantizer: Any = None
    ) -> None:
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose, self._transpose_invalid = None, True

    def size(self) -> torch.Size:
        return self._data.size()

    def update_usage(self, columnwise_usage: bool) -> None:
        if FP8GlobalStateManager.reads_rows:
            self._transpose, self._transpose_invalid = None, True
        elif self._transpose_invalid:
            self._transpose = fp8_transpose(self._data, self._fp8_dtype)
            self._transpose_invalid = False

    def values(self, transposed: bool) -> Tensor:
        """As the GEMM reads it: the transpose, where it needs one."""
        transposed = transposed and not FP8GlobalStateManager.reads_rows
        assert not (transposed and self._transpose_invalid), "no transpose was made"
        data = self._transpose.t() if transposed else self._data
        return data.contiguous().view(_TORCH[self._fp8_dtype]).float() * self._scale_inv


class Float8Tensor(Float8TensorStorage, Weight):
    def __init__(self, stored: Any) -> None:
        Weight.__init__(self, stored)

    def moved(self, buffer: Tensor) -> None:
        """As a distributed optimizer does it: the bytes lie in its buffer now."""
        self._data = buffer[: self._data.numel()].view(self._data.shape).copy_(self._data)

    def change(self, values: Tensor) -> None:
        """As an optimizer's step does it, in place: a transpose of before is stale."""
        fresh = Float8Quantizer(self._fp8_dtype, None)(values)
        self._data.copy_(fresh._data)
        self._scale_inv.copy_(fresh._scale_inv)
        self._transpose_invalid = True


def fp8_transpose(data: Tensor, dtype: DType, out: Tensor | None = None) -> Tensor:
    return data.flatten(0, -2).t().contiguous()


class Float8Quantizer:
    """One scale a tensor; of `group`, one of all ranks, whose rows are gathered."""

    def __init__(self, dtype: DType, group: Any) -> None:
        self._dtype, self._group = dtype, group

    def set_usage(self, **usage: bool) -> None: ...

    def __call__(self, tensor: Tensor) -> Float8TensorStorage:
        largest = tensor.abs().amax()
        if self._group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        scale = torch.tensor([2.0 ** math.ceil(math.log2(largest.item() / 256))])
        data = (tensor / scale).to(_TORCH[self._dtype]).view(torch.uint8)
        return Float8TensorStorage(data, scale, self._dtype)


def quantizer_of(dtype: DType, group: Any = None, weight: bool = False) -> Any:
    if FP8GlobalStateManager.recipe.float8_block_scaling():
        return Float8BlockQuantizer(dtype, _TORCH[dtype], 2 if weight else 1)
    return Float8Quantizer(dtype, group)


def parameter_of(w: Tensor) -> Any:
    """A weight that is FP8, by the recipe."""
    stored = quantizer_of(DType.kFloat8E4M3, weight=True)(w)
    if isinstance(stored, Float8BlockwiseQTensorStorage):
        return Float8BlockwiseQTensor(stored)
    made = Float8Tensor(stored)
    made.moved(torch.zeros(2**14, dtype=torch.uint8)[64:])
    return made


def assert_dim_for_fp8_exec(*tensors: Any) -> None:
    for one in tensors:
        fits = math.prod(one.shape[:-1]) % 8 == 0 == one.shape[-1] % 16
        assert fits, f"dims={list(one.shape)}"


_QUANTIZED = (Float8TensorStorage, Float8BlockwiseQTensorStorage)


def general_gemm(
    A: Any, B: Any, out_dtype: Any = None, quantization_params: Any = None, gelu: bool = False,
    layout: str = "TN", bias: Tensor | None = None, use_split_accumulator: bool = False,
    grad: bool = False, ub: Any = None, ub_type: Any = None, extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> Any:  # fmt: skip
    assert ub is None, "userbuffers are not there"
    a, b = (
        one.values(transposed) if isinstance(one, _QUANTIZED) else one.float()
        for one, transposed in ((A, layout[0] == "N"), (B, layout[1] == "T"))
    )
    b = b.flatten(0, -2).t() if layout[1] == "T" else b
    y = b @ (a.t() if layout[0] == "T" else a.flatten(0, -2))
    return (y + bias if bias is not None else y), None, None, extra_output


def get_ub(name: str, use_fp8: bool) -> Any:
    key = name, UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE
    assert key in base._ub_communicators
    return base._ub_communicators[key]


def fill_userbuffers_buffer_for_all_gather(
    comm: Any, local: Any, quantizer: Any, group: Any
) -> tuple[Any, Any]:
    """The whole of a shard that is put in the communicator's buffer."""
    if isinstance(quantizer, Float8BlockQuantizer):
        raise ValueError(f"Unsupported quantizer for Userbuffers ({quantizer})")
    size = local.size()
    shape = [size[0] * group.size(), *size[1:]]
    if isinstance(local, Float8TensorStorage):
        assert comm.is_fp8_ubuf()
        comm.copy_into_buffer(local._data, local_chunk=True)
        whole = comm.get_buffer(shape=shape)
        return Float8TensorStorage(whole, local._scale_inv, local._fp8_dtype), local
    assert not comm.is_fp8_ubuf()
    comm.copy_into_buffer(local, local_chunk=True)
    return comm.get_buffer(shape=shape), local


class TransformerEngineBaseModule(torch.nn.Module):
    @staticmethod
    def grad_output_preprocess(ctx: Any, dy: Tensor, row: bool, quantizer: Any) -> tuple[Any, Any]:
        if quantizer is not None and not (row and not ctx.ub_overlap_ag):
            dy = quantizer(dy)
        if row and ctx.ub_overlap_ag:
            fill = base.fill_userbuffers_buffer_for_all_gather
            return fill(ctx.ub_obj_gradout, dy, quantizer, ctx.layer.group)[0], None
        if row:
            dy, _ = gather_along_first_dim(dy, ctx.layer.group, quantizer=quantizer)
        return dy, None


def gather_along_first_dim(
    local: Any, group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[Any, Any]:
    """The whole, and None: it is there."""
    if quantizer is not None and isinstance(local, Tensor):
        local = quantizer(local)
    if isinstance(local, Float8BlockwiseQTensorStorage):
        assert quantizer.is_quantizable(local), "All-gather requires quantizable tensor"
        return gather_blocks(local, group, quantizer), None
    data = local._data if isinstance(local, Float8TensorStorage) else local
    whole = data.new_empty(group.size() * data.shape[0], *data.shape[1:])
    dist.all_gather_into_tensor(whole, data.contiguous(), group=group)
    if whole.dtype is not torch.uint8:
        return whole, None
    return Float8TensorStorage(whole, local._scale_inv, local._fp8_dtype), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        column, fp8 = layer.parallel_mode == "column", FP8GlobalStateManager.enabled
        gathers, scatters = layer.ub_overlap_ag_fprop, layer.ub_overlap_rs_fprop
        ub = get_ub(layer.ub_name + "_fprop", fp8) if gathers or scatters else None
        shard, weight, quantizer = x, w, None
        if fp8:
            quantizer = quantizer_of(DType.kFloat8E4M3, layer.group if column else None)
            linear.assert_dim_for_fp8_exec(x, w)
            shard = quantizer(x)
            if not isinstance(w, _QUANTIZED):
                weight = quantizer_of(DType.kFloat8E4M3, weight=True)(w)
            if column:
                quantizer.set_usage(rowwise=True, columnwise=False)
        total = shard
        if gathers:
            fill = linear.fill_userbuffers_buffer_for_all_gather
            total, _ = fill(ub, shard, quantizer, layer.group)
        elif column:
            total, _ = gather_along_first_dim(shard, layer.group, quantizer=quantizer)
        options: dict[str, Any] = {"out_dtype": x.dtype, "bias": bias}
        if ub is not None:
            options |= {"ub": ub, "ub_type": CommOverlapType.AG if gathers else CommOverlapType.RS}
        R = layer.group.size()
        scattered = x.new_empty(x.shape[0] // R, *x.shape[1:-1], w.shape[0]) if scatters else None
        y, *_, extra = linear.general_gemm(weight, total, extra_output=scattered, **options)
        if scatters:
            y = extra
        elif not column:
            y = scatter(y, layer.group)
        ctx.layer, ctx.fp8, ctx.shape = layer, fp8, x.shape
        ctx.ub_overlap_ag, ctx.ub_overlap_rs_dgrad = (
            layer.ub_overlap_ag_dgrad, layer.ub_overlap_rs_dgrad,
        )  # fmt: skip
        ctx.saved, ctx.requires_wgrad, ctx.input_quantizer = (shard, weight), True, quantizer
        return y.view(-1, *x.shape[1:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        layer, (shard, weight) = ctx.layer, ctx.saved
        column, dtype = layer.parallel_mode == "column", dy.dtype
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        asked = ctx.ub_overlap_ag or ctx.ub_overlap_rs_dgrad
        ub = ctx.ub_obj_gradout = get_ub(layer.ub_name + "_dgrad", ctx.fp8) if asked else None
        quantizer = None
        if ctx.fp8:
            quantizer = quantizer_of(DType.kFloat8E5M2, None if column else layer.group)
            if ctx.ub_overlap_ag:
                quantizer.set_usage(columnwise=False)
        total, _ = base.TransformerEngineBaseModule.grad_output_preprocess(
            ctx, dy, not column, quantizer
        )
        x, work = shard, None
        if ctx.fp8:
            weight.update_usage(columnwise_usage=True)
        if column:
            if ctx.fp8:
                ctx.input_quantizer.set_usage(rowwise=False, columnwise=True)
            x, work = linear.gather_along_first_dim(
                shard, layer.group, async_op=True, quantizer=ctx.input_quantizer
            )
        options: dict[str, Any] = {"out_dtype": dtype, "layout": "NN", "grad": True}
        if ub is not None:
            kind = CommOverlapType.AG if ctx.ub_overlap_ag else CommOverlapType.RS
            options |= {"ub": ub, "ub_type": kind, "use_split_accumulator": True}
        rows = math.prod(ctx.shape[:-1])
        scattered = dy.new_empty(rows, ctx.shape[-1]) if ctx.ub_overlap_rs_dgrad else None
        dx, *_, extra = linear.general_gemm(weight, total, extra_output=scattered, **options)
        if ctx.ub_overlap_rs_dgrad:
            dx = extra
        elif column:
            dx = scatter(dx, layer.group)
        if work is not None:
            work.wait()
        for one in (x, total) if ctx.fp8 else ():
            one.update_usage(columnwise_usage=True)
        wgrad = functools.partial(
            linear.general_gemm, x, total, layout="NT", grad=True, out_dtype=dtype
        )
        if layer.delay_wgrad_compute:
            layer.delayed = wgrad
        dw = None if layer.delay_wgrad_compute else wgrad()[0]
        return dx.view(ctx.shape), dw, None, None


def scatter(y: Tensor, group: Any) -> Tensor:
    shard = y.new_empty(y.shape[0] // group.size(), *y.shape[1:])
    dist.reduce_scatter_tensor(shard, y.contiguous(), group=group)
    return shard


class Linear(torch.nn.Module):
    delay_wgrad_compute = False

    def __init__(self, w: Tensor, mode: str, group: Any, bias: Any = None) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(w), bias
        self.parallel_mode, self.group, self.ub_name = mode, group, None
        self.tp_group, self.sequence_parallel = group, True
        self.ub_overlap_ag_fprop = self.ub_overlap_rs_dgrad = False
        self.ub_overlap_rs_fprop = self.ub_overlap_ag_dgrad = False

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self)

    def backward_dw(self) -> None:
        self.weight.grad, *_ = self.delayed()


def _module(name: str, **names: Any) -> Any:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    sys.modules[name] = made
    return made


_PACKAGE = "transformer_engine.pytorch.module"
base: Any = None
linear: Any = None


def install() -> None:
    """Be TransformerEngine in this process, once."""
    global base, linear
    if base is not None:
        return
    for name in ("transformer_engine", "transformer_engine.pytorch", _PACKAGE):
        _module(name, __path__=[])
    _module("transformer_engine.pytorch.distributed", gather_along_first_dim=gather_along_first_dim)
    _module(
        "transformer_engine_torch", CommOverlapType=CommOverlapType, DType=DType,
        fp8_transpose=fp8_transpose,
    )  # fmt: skip
    _module(
        "transformer_engine.pytorch.utils",
        is_non_tn_fp8_gemm_supported=lambda: FP8GlobalStateManager.reads_rows,
    )
    base = _module(
        f"{_PACKAGE}.base", UserBufferQuantizationMode=UserBufferQuantizationMode,
        Float8TensorStorage=Float8TensorStorage, FP8GlobalStateManager=FP8GlobalStateManager,
        _ub_communicators=None, initialize_ub=None, Float8BlockQuantizer=Float8BlockQuantizer,
        Float8BlockwiseQTensorStorage=Float8BlockwiseQTensorStorage,
        fill_userbuffers_buffer_for_all_gather=fill_userbuffers_buffer_for_all_gather,
        TransformerEngineBaseModule=TransformerEngineBaseModule,
    )  # fmt: skip
    linear = _module(
        f"{_PACKAGE}.linear", general_gemm=general_gemm, Linear=Linear,
        assert_dim_for_fp8_exec=assert_dim_for_fp8_exec,
        gather_along_first_dim=gather_along_first_dim,
        fill_userbuffers_buffer_for_all_gather=fill_userbuffers_buffer_for_all_gather,
    )  # fmt: skip
    other = type("LayerNormLinear", (Linear,), {})
    norm = _module(f"{_PACKAGE}.layernorm_linear", LayerNormLinear=other)
    mlp = _module(f"{_PACKAGE}.layernorm_mlp")
    sys.modules[_PACKAGE].__dict__.update(
        base=base, linear=linear, layernorm_linear=norm, layernorm_mlp=mlp
    )
