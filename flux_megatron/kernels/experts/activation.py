"""What experts do between their GEMMs, over only the rows that came: the product of a gated linear
unit, with the bias of the GEMM before it. Forward and backward.

A buffer of an expert layer has rows for the worst case, twice as many as come on average with two
ranks and top-2. Only the device knows how many came. Each CTA adds up the counts and takes every
so many'th block of those rows; what is behind them stays as it is.

All arithmetic is fp32; a stored value is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.experts.scaled import BLOCK, Bias, count, expert_of
from flux_megatron.kernels.launch import persistent_grid
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

CTAS_OF_AN_SM = 8  # of 256 threads: as many as are resident


class Gate(NamedTuple):
    """a(gate) * (linear + offset), of gates up to `clamp` and linear values up to it on both sides
    of 0; 0.0: of all values.
    """

    activation: str  # a: silu, gelu or quick_gelu
    clamp: float = 0.0
    offset: float = 0.0


@triton.jit
def _rows_that_came(received, slots, capacity, SLOTS: tl.constexpr):
    at = tl.arange(0, SLOTS)
    # more than the capacity is an error that is reported elsewhere
    return min(tl.sum(tl.load(received + at, mask=at < slots, other=0), 0), capacity)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """a(gate) and its derivative; gelu is that with erf, quick_gelu that with a sigmoid."""
    if ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        steep: tl.constexpr = 1.702 if ACTIVATION == "quick_gelu" else 1.0
        share = 1.0 / (1.0 + tl.exp(-steep * gate))
        slope = share * (1.0 + steep * gate * (1.0 - share))
    return gate * share, slope


@triton.jit
def _load_block(
    x, bias, ends, experts, block, columns, N, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Its row and columns, and the gates and linear values there."""
    row = (block // columns).to(tl.int64)
    cols = block % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(x + row * 2 * N + cols, mask=cols < N).to(tl.float32)
    linear = tl.load(x + row * 2 * N + N + cols, mask=cols < N).to(tl.float32)
    if bias is not None:
        expert = tl.sum(expert_of(row + tl.zeros([1], tl.int64), ends, experts, EXPERTS), 0)
        own = bias + expert.to(tl.int64) * 2 * N
        gate += tl.load(own + cols, mask=cols < N).to(tl.float32)
        linear += tl.load(own + N + cols, mask=cols < N).to(tl.float32)
    return row, cols, gate, linear


@triton.jit
def _clamped(gate, linear, CLAMP: tl.constexpr):
    if CLAMP > 0.0:
        gate, linear = tl.minimum(gate, CLAMP), tl.minimum(tl.maximum(linear, -CLAMP), CLAMP)
    return gate, linear


# the numbers of rows and experts must not compile new kernels
@triton.jit(do_not_specialize=["slots", "capacity", "experts"])
def gated_forward_kernel(
    x, weights, bias, ends, received, y, slots, capacity, experts, N, ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr, OFFSET: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    blocks = _rows_that_came(received, slots, capacity, SLOTS) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, cols, gate, linear = _load_block(
            x, bias, ends, experts, block, columns, N, SLOTS, BLOCK_N
        )
        gate, linear = _clamped(gate, linear, CLAMP)
        value, _ = _activated(gate, ACTIVATION)
        value *= linear + OFFSET
        if weights is not None:
            value *= tl.load(weights + row)
        tl.store(y + row * N + cols, value.to(y.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["slots", "capacity", "experts"])
def gated_backward_kernel(
    dy, x, weights, dweights, bias, ends, received, dx, slots, capacity, experts, N,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With weights a block is a whole row, because a weight's gradient is a sum over it."""
    columns = tl.cdiv(N, BLOCK_N)
    blocks = _rows_that_came(received, slots, capacity, SLOTS) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, cols, before, linear_before = _load_block(
            x, bias, ends, experts, block, columns, N, SLOTS, BLOCK_N
        )
        gradient = tl.load(dy + row * N + cols, mask=cols < N).to(tl.float32)
        gate, linear = _clamped(before, linear_before, CLAMP)
        value, slope = _activated(gate, ACTIVATION)
        linear += OFFSET
        if weights is not None:
            products = tl.where(cols < N, gradient * value * linear, 0.0)
            tl.store(dweights + row, tl.sum(products, 0))
            gradient *= tl.load(weights + row)
        of_gate, of_linear = gradient * linear * slope, gradient * value
        if CLAMP > 0.0:
            of_gate = tl.where(before <= CLAMP, of_gate, 0.0)
            of_linear = tl.where(tl.abs(linear_before) <= CLAMP, of_linear, 0.0)
        tl.store(dx + row * 2 * N + cols, of_gate.to(dx.dtype.element_ty), mask=cols < N)
        tl.store(dx + row * 2 * N + N + cols, of_linear.to(dx.dtype.element_ty), mask=cols < N)


def _launch_gated(
    kernel, capacity: int, N: int, gate: Gate, bias: Bias | None, received: Tensor,
    *tensors: Tensor | None, whole: bool = False,
) -> None:  # fmt: skip
    """`tensors` are those of the kernel before the bias, and the last; with `whole` a block is a
    row.
    """
    block_n = next_power_of_2(N) if whole else min(BLOCK, next_power_of_2(N))
    tile = Tile(1, block_n, num_warps=16 if block_n > 4096 else 8)
    blocks = max(1, capacity * cdiv(N, tile.block_n))
    (sms,) = persistent_grid(received.device, blocks)
    *first, last = tensors
    launch_kernel(
        kernel, (min(CTAS_OF_AN_SM * sms, blocks),), tile,
        (*first, *(bias or (None, None)), received, last),
        (received.numel(), capacity, count(bias)), (N,),
        ACTIVATION=gate.activation, CLAMP=gate.clamp, OFFSET=gate.offset,
        SLOTS=next_power_of_2(received.numel()),
    )  # fmt: skip


def gated_forward(
    x: Tensor, received: Tensor, gate: Gate, weights: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:  # fmt: skip
    """x [capacity, 2 N] of gates and linear values, plus the bias -> their products [capacity, N],
    times `weights` fp32 [capacity].

    Of the first rows, as many as `received` int32 [R, E] counts; nothing is written behind them.
    """
    N = x.shape[1] // 2
    y = x.new_empty(len(x), N)
    _launch_gated(gated_forward_kernel, len(x), N, gate, bias, received, x, weights, y)
    return y


def gated_backward(
    dy: Tensor, x: Tensor, received: Tensor, gate: Gate, weights: Tensor | None = None,
    bias: Bias | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx [capacity, 2 N] for dy [capacity, N], of the same rows, and that of the weights."""
    dx, dweights = torch.empty_like(x), None if weights is None else torch.empty_like(weights)
    _launch_gated(
        gated_backward_kernel, *dy.shape, gate, bias, received, dy, x, weights, dweights, dx,
        whole=weights is not None,
    )  # fmt: skip
    return dx, dweights
