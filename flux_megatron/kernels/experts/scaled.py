"""Rows of experts times the router's probabilities, with the bias of the GEMM before, one row an
expert. Forward and backward.

All arithmetic is fp32; a stored value is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

BLOCK = 2048  # 16 bytes of bf16 a thread
COLUMNS_MAX = 16384  # of rows that a CTA takes at once


class Bias(NamedTuple):
    """Rows [E, columns], one an expert, and where the rows of each end: int32 [E]."""

    rows: Tensor
    ends: Tensor


@triton.jit
def expert_of(rows, ends, experts, EXPERTS: tl.constexpr):
    """Of each row [n]; behind the last row it is the last expert."""
    at = tl.arange(0, EXPERTS)
    until = tl.load(ends + at, mask=at < experts - 1, other=2147483647)
    return tl.sum((until[None, :] <= rows[:, None]).to(tl.int32), 1)


@triton.jit
def _load_rows(
    x, bias, ends, experts, M, N, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program's rows, their places in memory, which of these there are, and the values."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = expert_of(rows, ends, experts, EXPERTS)[:, None].to(tl.int64) * N + cols[None, :]
        values += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)
    return rows, at, inside, values


@triton.jit(do_not_specialize=["M", "experts"])
def scaled_forward_kernel(
    x, scale, bias, ends, y, M, experts, N, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, at, inside, values = _load_rows(x, bias, ends, experts, M, N, EXPERTS, BLOCK_M, BLOCK_N)
    factor = tl.load(scale + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(y + at, (values * factor[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "experts"])
def scaled_backward_kernel(
    dy, x, scale, bias, ends, dscale, dx, M, experts, N, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, at, inside, values = _load_rows(x, bias, ends, experts, M, N, EXPERTS, BLOCK_M, BLOCK_N)
    factor = tl.load(scale + rows, mask=rows < M, other=0.0).to(tl.float32)
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (gradient * factor[:, None]).to(dx.dtype.element_ty), mask=inside)
    products = tl.sum(gradient * values, 1)
    tl.store(dscale + rows, products.to(dscale.dtype.element_ty), mask=rows < M)


def count(bias: Bias | None) -> int:
    """Of its experts."""
    return 0 if bias is None else len(bias.ends)


def _launch(kernel, bias: Bias | None, first: tuple[Tensor, ...], last: tuple[Tensor, ...]) -> None:
    """`first` and `last`: tensors of the kernel before the bias and behind it, the last [M, N]."""
    M, N = last[-1].shape
    if M:
        block_n = next_power_of_2(N)
        tile = Tile(max(1, BLOCK // block_n), block_n, num_warps=16 if block_n > 4096 else 8)
        launch_kernel(
            kernel, (cdiv(M, tile.block_m),), tile, (*first, *(bias or (None, None)), *last),
            (M, count(bias)), (N,), EXPERTS=next_power_of_2(max(1, count(bias))),
        )  # fmt: skip


def scaled_forward(x: Tensor, scale: Tensor, bias: Bias | None = None) -> Tensor:
    """x [M, N], scale [M] of any dtype -> (x + bias) * scale [M, N] in the dtype of x."""
    y = torch.empty_like(x)
    _launch(scaled_forward_kernel, bias, (x, scale), (y,))
    return y


def scaled_backward(
    dy: Tensor, x: Tensor, scale: Tensor, bias: Bias | None = None
) -> tuple[Tensor, Tensor]:
    """dx [M, N] and dscale [M] for dy [M, N]."""
    dx, dscale = torch.empty_like(x), torch.empty_like(scale)
    _launch(scaled_backward_kernel, bias, (dy, x, scale), (dscale, dx))
    return dx, dscale
