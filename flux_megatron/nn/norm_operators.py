"""The norms' kernels as torch custom operators, for torch.compile; eager code calls `norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flux_megatron.kernels import norm as kernels
from flux_megatron.nn.norm import _rows


@torch.library.custom_op("flux_megatron::norm", mutates_args=())
def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and for backward the fp32 mean (empty for `rms_norm`) and 1 / deviation of each row."""
    y, mean, rstd = kernels.norm_forward(
        _rows(x), weight, bias, eps=eps, one_plus=zero_centered, center=name == "layer_norm"
    )
    return y.resize_(x.shape), rstd.new_empty(0) if mean is None else mean, rstd


@norm.register_fake
def _(x, weight, bias, name, eps, zero_centered):
    rows = x.shape[:-1].numel()
    mean = weight.new_empty(rows if name == "layer_norm" else 0, dtype=torch.float32)
    return weight.new_empty(x.shape), mean, weight.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("flux_megatron::norm_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool,
    bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and the gradients of weight and, with `bias`, bias, as rows of one matrix."""
    rows = _rows(x)
    dx, gradients = kernels.norm_backward(
        dy.reshape(rows.shape).contiguous(), rows, weight, mean if mean.numel() else None, rstd,
        one_plus=zero_centered, bias=bias,
    )  # fmt: skip
    return dx.view(x.shape), gradients


@_backward.register_fake
def _(dy, x, weight, mean, rstd, zero_centered, bias):
    return x.new_empty(x.shape), weight.new_empty(1 + bias, weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, ctx.zero_centered = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, gradients = _backward(dy, *ctx.saved_tensors, ctx.zero_centered, ctx.has_bias)
    return dx, gradients[0], gradients[1] if ctx.has_bias else None, None, None, None


norm.register_autograd(_gradients, setup_context=_keep)
