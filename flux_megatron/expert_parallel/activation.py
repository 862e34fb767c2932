"""What experts do besides their GEMMs: biases, the gated activation, over only the rows that came,
and the product with the router's probabilities. Our kernels on GPUs, torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flux_megatron.expert_parallel.wgrad import ends, weight_gradient
from flux_megatron.kernels import launch
from flux_megatron.kernels.experts import activation as kernels
from flux_megatron.kernels.experts.scaled import (
    COLUMNS_MAX,
    Bias,
    scaled_backward,
    scaled_forward,
)

# Whether the kernels run on CPU tensors too, in the interpreter. Only tests of the kernels set it.
INTERPRET = False

# functions that the kernels know
NAMES: dict[Any, str] = {F.silu: "silu", F.gelu: "gelu"}


def gated(
    x: Tensor, received: Tensor, activation: Callable[[Tensor], Tensor],
    weights: Tensor | None = None, bias: Tensor | None = None, clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """activation(gate) * (linear + offset) [capacity, N], of x [capacity, 2 N], a gate's row before
    its linear one; times `weights` fp32 [capacity], before it is rounded.

    `bias` [E, 2 N] is added first, to each row that of its expert. Gates are `clamp` at most,
    linear values within it on both sides of 0. `received` int32 [R, E] counts the rows that came,
    which are the first ones. Neither the result nor the gradient is defined behind them.
    """
    N = x.shape[1] // 2
    whole = weights is None or N <= COLUMNS_MAX
    if activation in NAMES and whole and _by_kernel(x, N):
        gate = kernels.Gate(NAMES[activation], clamp or 0.0, offset)
        return _Gated.apply(x.contiguous(), weights, bias, received, gate)
    if bias is not None:
        x = biased(x, bias, received)
    gates, linear = x.chunk(2, -1)
    if clamp is not None:
        gates, linear = gates.clamp(max=clamp), linear.clamp(-clamp, clamp)
    y = activation(gates) * (linear + offset if offset else linear)
    return y if weights is None else scaled(y, weights)


def scaled(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """(x + bias) * scale [M, N] in the dtype of x; scale [M], of any floating dtype.

    `bias` [E, N] has a row for each expert, whose rows of x int32 `counts` [E] says.
    """
    if x.shape[1] <= COLUMNS_MAX and _by_kernel(x, x.shape[1]):
        return _Scaled.apply(x.contiguous(), scale.contiguous(), bias, counts)
    if bias is not None and counts is not None:
        x = biased(x, bias, counts[None])
    return (x * scale.unsqueeze(-1)).to(x.dtype)


def biased(x: Tensor, bias: Tensor, received: Tensor) -> Tensor:
    """x [capacity, N] plus the row of `bias` [E, N] that is its expert's. By torch, all rows of the
    buffer.
    """
    return _Biased.apply(x, bias, received)


def _by_kernel(x: Tensor, N: int) -> bool:
    if not (x.is_cuda or INTERPRET) or N == 0:
        return False
    return launch.supports_tensors(x.dtype, x.device.type) is None


def _sums(rows: Tensor, received: Tensor) -> Tensor:
    """Of each expert's rows [capacity, N], as `received` counts them: [E, N]."""
    ones = rows.new_ones(len(rows), 8)  # whole 16-byte units for a GEMM
    return weight_gradient(rows, ones, received)[..., 0]


def _of_experts(bias: Tensor | None, received: Tensor) -> Bias | None:
    return None if bias is None else Bias(bias.contiguous(), ends(received))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, bias: Tensor | None, received: Tensor,
        gate: kernels.Gate,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weights, bias, received)
        ctx.gate = gate
        return kernels.gated_forward(x, received, gate, weights, _of_experts(bias, received))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weights, bias, received = ctx.saved_tensors
        own = _of_experts(bias, received)
        dx, dweights = kernels.gated_backward(dy.contiguous(), x, received, ctx.gate, weights, own)
        return dx, dweights, None if bias is None else _sums(dx, received), None, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, bias: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, scale, bias, counts)
        own = None if counts is None else _of_experts(bias, counts[None])
        return scaled_forward(x, scale, own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, scale, bias, counts = ctx.saved_tensors
        own = None if counts is None else _of_experts(bias, counts[None])
        dx, dscale = scaled_backward(dy.contiguous(), x, scale, own)
        return dx, dscale, None if own is None else _sums(dx, counts[None]), None


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, received: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        experts = torch.searchsorted(ends(received), rows, right=True).clamp_(max=len(bias) - 1)
        ctx.save_for_backward(received)
        return x + bias[experts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (received,) = ctx.saved_tensors
        return dy, _sums(dy, received), None
