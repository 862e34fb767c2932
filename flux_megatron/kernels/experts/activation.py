"""What experts do between and behind their GEMMs, over only the rows that came: the product of a
gated linear unit, and rows times the router's probabilities. Forward and backward.

A buffer of an expert layer has rows for the worst case, twice as many as come on average with two
ranks and top-2. Only the device knows how many came. Each CTA adds up the counts and takes every
so many'th block of those rows; what is behind them stays as it is.

All arithmetic is fp32; a stored value is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.launch import persistent_grid
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

CTAS_OF_AN_SM = 8  # of 256 threads: as many as are resident
BLOCK = 2048  # 16 bytes of bf16 a thread
COLUMNS_MAX = 16384  # of rows that a CTA takes at once


@triton.jit
def _rows_that_came(received, slots, capacity, SLOTS: tl.constexpr):
    at = tl.arange(0, SLOTS)
    # more than the capacity is an error that is reported elsewhere
    return min(tl.sum(tl.load(received + at, mask=at < slots, other=0), 0), capacity)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """a(gate) and its derivative; gelu is that with erf."""
    if ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-gate))
        slope = share * (1.0 + gate * (1.0 - share))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    return gate * share, slope


@triton.jit
def _load_block(x, block, columns, N, BLOCK_N: tl.constexpr):
    """Its row and columns, and the gates and linear values there."""
    row = (block // columns).to(tl.int64)
    cols = block % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(x + row * 2 * N + cols, mask=cols < N).to(tl.float32)
    linear = tl.load(x + row * 2 * N + N + cols, mask=cols < N).to(tl.float32)
    return row, cols, gate, linear


# the numbers of rows and experts must not compile new kernels
@triton.jit(do_not_specialize=["slots", "capacity"])
def gated_forward_kernel(
    x, weights, received, y, slots, capacity, N,
    ACTIVATION: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    blocks = _rows_that_came(received, slots, capacity, SLOTS) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, cols, gate, linear = _load_block(x, block, columns, N, BLOCK_N)
        value, _ = _activated(gate, ACTIVATION)
        value *= linear
        if weights is not None:
            value *= tl.load(weights + row)
        tl.store(y + row * N + cols, value.to(y.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["slots", "capacity"])
def gated_backward_kernel(
    dy, x, weights, dweights, received, dx, slots, capacity, N,
    ACTIVATION: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With weights a block is a whole row, because a weight's gradient is a sum over it."""
    columns = tl.cdiv(N, BLOCK_N)
    blocks = _rows_that_came(received, slots, capacity, SLOTS) * columns
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, cols, gate, linear = _load_block(x, block, columns, N, BLOCK_N)
        gradient = tl.load(dy + row * N + cols, mask=cols < N).to(tl.float32)
        value, slope = _activated(gate, ACTIVATION)
        if weights is not None:
            products = tl.where(cols < N, gradient * value * linear, 0.0)
            tl.store(dweights + row, tl.sum(products, 0))
            gradient *= tl.load(weights + row)
        of_gate, of_linear = gradient * linear * slope, gradient * value
        tl.store(dx + row * 2 * N + cols, of_gate.to(dx.dtype.element_ty), mask=cols < N)
        tl.store(dx + row * 2 * N + N + cols, of_linear.to(dx.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def scaled_forward_kernel(x, scale, y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    factor = tl.load(scale + rows, mask=rows < M, other=0.0).to(tl.float32)
    result = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def scaled_backward_kernel(
    dy, x, scale, dx, dscale, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    factor = tl.load(scale + rows, mask=rows < M, other=0.0).to(tl.float32)
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (gradient * factor[:, None]).to(dx.dtype.element_ty), mask=inside)
    products = tl.sum(gradient * values, 1)
    tl.store(dscale + rows, products.to(dscale.dtype.element_ty), mask=rows < M)


def _launch_gated(
    kernel, capacity: int, N: int, activation: str, received: Tensor, *tensors: Tensor | None,
    whole: bool = False,
) -> None:  # fmt: skip
    """`tensors` are those of the kernel, which reads the counts `received`; with `whole` a block is
    a row.
    """
    block_n = next_power_of_2(N) if whole else min(BLOCK, next_power_of_2(N))
    tile = Tile(1, block_n, num_warps=16 if block_n > 4096 else 8)
    blocks = max(1, capacity * cdiv(N, tile.block_n))
    (sms,) = persistent_grid(received.device, blocks)
    launch_kernel(
        kernel, (min(CTAS_OF_AN_SM * sms, blocks),), tile, tensors,
        (received.numel(), capacity), (N,),
        ACTIVATION=activation, SLOTS=next_power_of_2(received.numel()),
    )  # fmt: skip


def _launch_scaled(kernel, M: int, N: int, *tensors: Tensor) -> None:
    if M:
        block_n = next_power_of_2(N)
        tile = Tile(max(1, BLOCK // block_n), block_n, num_warps=16 if block_n > 4096 else 8)
        launch_kernel(kernel, (cdiv(M, tile.block_m),), tile, tensors, (M,), (N,))


def gated_forward(
    x: Tensor, received: Tensor, activation: str, weights: Tensor | None = None
) -> Tensor:
    """x [capacity, 2 N] of gates and linear values -> a(gate) * linear [capacity, N], times
    `weights` fp32 [capacity].

    Of the first rows, as many as `received` int32 [R, E] counts; nothing is written behind them.
    """
    N = x.shape[1] // 2
    y = x.new_empty(len(x), N)
    _launch_gated(gated_forward_kernel, len(x), N, activation, received, x, weights, received, y)
    return y


def gated_backward(
    dy: Tensor, x: Tensor, received: Tensor, activation: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """dx [capacity, 2 N] for dy [capacity, N], of the same rows, and that of the weights."""
    dx, dweights = torch.empty_like(x), None if weights is None else torch.empty_like(weights)
    _launch_gated(
        gated_backward_kernel, *dy.shape, activation, received, dy, x, weights, dweights, received,
        dx, whole=weights is not None,
    )  # fmt: skip
    return dx, dweights


def scaled_forward(x: Tensor, scale: Tensor) -> Tensor:
    """x [M, N], scale [M] of any dtype -> x * scale [M, N] in the dtype of x."""
    y = torch.empty_like(x)
    _launch_scaled(scaled_forward_kernel, *x.shape, x, scale, y)
    return y


def scaled_backward(dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dx [M, N] and dscale [M] for dy [M, N]."""
    dx, dscale = torch.empty_like(x), torch.empty_like(scale)
    _launch_scaled(scaled_backward_kernel, *x.shape, dy, x, scale, dx, dscale)
    return dx, dscale
