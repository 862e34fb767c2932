"""dw of a GEMM of experts: for each of them, a product over the rows that it has received.

No signals: the rows are here. How many an expert has only the device knows. The products make a new
tensor, or are added where gradients lie (`experts.weights`), here or as the library made them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.portable.gemm_tile import multiply_add, tile_origin
from flux_megatron.kernels.sizes import cdiv, next_power_of_2, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

ADDED = 2048  # elements of a program; 8192 take 1.5 times as long (H200, Triton 3.6, 2026-11-29)


@triton.jit(do_not_specialize=["dw_first", "dw_pitch"])
def expert_wgrad_kernel(
    a, b, ends, dw, dw_first, dw_pitch, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    row, col = tile_origin(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
    first = 0
    if expert > 0:
        first = tl.load(ends + expert - 1)
    end = tl.load(ends + expert)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(first, end, BLOCK_K):
        ks = (at + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(
            a + ks[None, :] * M + rows[:, None],
            mask=(ks[None, :] < end) & (rows[:, None] < M), other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + ks[:, None] * N + cols[None, :],
            mask=(ks[:, None] < end) & (cols[None, :] < N), other=0.0,
        )  # fmt: skip
        acc = multiply_add(left, right, acc)
    first_row = dw_first + expert * dw_pitch
    out = dw + (first_row.to(tl.int64) + rows)[:, None] * N + cols[None, :]
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    if ADD:
        acc += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, acc.to(dw.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["into_first", "into_pitch", "blocks"])
def add_gradients_kernel(
    dw, into, into_first, into_pitch, blocks, M, N, BLOCK_N: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    size = tl.cast(M, tl.int64) * N
    out = into + (into_first + expert * into_pitch).to(tl.int64) * N + at
    own = tl.load(dw + expert * size + at, mask=at < size, other=0.0)
    before = tl.load(out, mask=at < size, other=0.0)
    total = before.to(tl.float32) + own.to(tl.float32)
    tl.store(out, total.to(into.dtype.element_ty), mask=at < size)


def _tile(M: int, N: int, a: Tensor) -> Tile:
    if a.device.type == "cpu":  # few large blocks are cheaper than many
        return Tile(min(64, next_power_of_2(M)), min(64, next_power_of_2(N)), 32)
    if a.dtype == torch.float32:
        return Tile(64, 64, 32, num_warps=4)
    return Tile(128, 128, 64, num_warps=8, num_stages=3)


def expert_wgrad(a: Tensor, b: Tensor, ends: Tensor, into: ExpertWeights | None = None) -> Tensor:
    """dw [E, M, N], of each expert a^T b over its rows of a [rows, M] and b [rows, N].

    `ends` int32 [E], on the device: where each expert's rows end. 0 for one without rows. Sums are
    fp32, added to `into` where that is given, in its dtype and order; else they make a new tensor.
    """
    M, N = a.shape[1], b.shape[1]
    dw = into or ExpertWeights(a.new_empty(len(ends), M, N))
    tile = _tile(M, N, a)
    launch_kernel(
        expert_wgrad_kernel, (len(ends) * tiles_of_shard(M, N, tile),), tile,
        (a, b, ends, dw.matrices), (dw.first, dw.pitch), (M, N), ADD=into is not None,
    )  # fmt: skip
    return dw.matrices


def add_gradients(into: ExpertWeights, dw: Tensor) -> None:
    """into += dw [E, M, N], of the experts in their order. One launch for all experts."""
    E, M, N = dw.shape
    tile = Tile(1, ADDED, num_warps=4)
    blocks = cdiv(M * N, ADDED)
    launch_kernel(
        add_gradients_kernel, (E * blocks,), tile, (dw, into.matrices),
        (into.first, into.pitch, blocks), (M, N),
    )  # fmt: skip
