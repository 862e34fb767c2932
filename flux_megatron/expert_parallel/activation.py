"""What experts do besides their GEMMs: the gated activation, over only the rows that came, and the
product with the router's probabilities. Our kernels on GPUs, torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts import activation as kernels

# Whether the kernels run on CPU tensors too, in the interpreter. Only tests of the kernels set it.
INTERPRET = False

NAMES: dict[Any, str] = {F.silu: "silu", F.gelu: "gelu"}


def gated(
    x: Tensor, received: Tensor, activation: Callable[[Tensor], Tensor],
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """activation(gate) * linear [capacity, N], of x [capacity, 2 N], a gate's row before its
    linear one; times `weights` fp32 [capacity], before it is rounded.

    `received` int32 [R, E] counts the rows that came, which are the first ones. Neither the result
    nor the gradient is defined behind them.
    """
    N = x.shape[1] // 2
    whole = weights is None or N <= kernels.COLUMNS_MAX
    if activation in NAMES and whole and _by_kernel(x, N):
        return _Gated.apply(x.contiguous(), weights, received, NAMES[activation])
    gate, linear = x.chunk(2, -1)
    y = activation(gate) * linear
    return y if weights is None else scaled(y, weights)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x * scale [M, N] in the dtype of x; scale [M], of any floating dtype."""
    if x.shape[1] <= kernels.COLUMNS_MAX and _by_kernel(x, x.shape[1]):
        return _Scaled.apply(x.contiguous(), scale.contiguous())
    return (x * scale.unsqueeze(-1)).to(x.dtype)


def _by_kernel(x: Tensor, N: int) -> bool:
    if not (x.is_cuda or INTERPRET) or N == 0:
        return False
    return launch.supports_tensors(x.dtype, x.device.type) is None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, received: Tensor, activation: str
    ) -> Tensor:
        ctx.save_for_backward(x, weights, received)
        ctx.activation = activation
        return kernels.gated_forward(x, received, activation, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weights, received = ctx.saved_tensors
        found = kernels.gated_backward(dy.contiguous(), x, received, ctx.activation, weights)
        return *found, None, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return kernels.scaled_forward(x, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        return kernels.scaled_backward(dy.contiguous(), *ctx.saved_tensors)
