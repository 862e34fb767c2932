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


def gated(x: Tensor, received: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * linear [capacity, N], of x [capacity, 2 N], a gate's row before its
    linear one.

    `received` int32 [R, E] counts the rows that came, which are the first ones. Neither the result
    nor the gradient is defined behind them.
    """
    if activation in NAMES and _by_kernel(x, x.shape[1] // 2):
        return _Gated.apply(x.contiguous(), received, NAMES[activation])
    gate, linear = x.chunk(2, -1)
    return activation(gate) * linear


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
    def forward(ctx: Any, x: Tensor, received: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x, received)
        ctx.activation = activation
        return kernels.gated_forward(x, received, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, received = ctx.saved_tensors
        return kernels.gated_backward(dy.contiguous(), x, received, ctx.activation), None, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return kernels.scaled_forward(x, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        return kernels.scaled_backward(dy.contiguous(), *ctx.saved_tensors)
