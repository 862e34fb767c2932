"""One output tile of a GEMM: the main loop that all fused kernels share, and the order of tiles.

x is [M, K] row-major; w is [N, K] (LAYOUT_NN false) or [K, N] (true), row-major. No size needs to
be a multiple of its block. Sums are fp32; fp32 operands are multiplied in full precision, never as
tf32. Of experts w is [E, N, K] or [E, K, N], and the matrix of `expert` begins `w_first + expert *
w_pitch` rows behind w (`experts.weights`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_origin(
    tile, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """Row and column of a tile. GROUP_M rows of tiles go column by column, so w stays in L2."""
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return (first_m + within % group_m) * BLOCK_M, within // group_m * BLOCK_N


@triton.jit
def multiply_add(x_tile, w_tile, acc):
    """acc + x_tile @ w_tile.

    For fp32 operands the sum of each k-tile is formed by itself, then added. One chain of K fused
    multiply-adds has over twice the error of cuBLAS (H200, K = 129, torch 2.11, triton 3.6). So is
    that of FP8, whose tensor cores keep fewer bits of a sum than fp32 has. The addition is an fma,
    because Triton merges a plain one into the chain.
    """
    if x_tile.dtype == tl.float32 or x_tile.dtype.is_fp8():
        block = tl.dot(x_tile, w_tile, input_precision="ieee")
        return tl.fma(block, tl.full(acc.shape, 1.0, tl.float32), acc)
    return tl.dot(x_tile, w_tile, acc)


@triton.jit
def w_operand(
    w, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT_NN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """w, or its TMA descriptor, which a CTA makes once for all its tiles."""
    operand = w
    if TMA:
        if LAYOUT_NN:
            operand = tl.make_tensor_descriptor(w, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
        else:
            operand = tl.make_tensor_descriptor(w, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    return operand


@triton.jit
def gemm_tile(
    x, w, row, col, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The tile of x @ w at (row, col), fp32 [BLOCK_M, BLOCK_N]. `w` comes from `w_operand`."""
    return gemm_tile_part(x, w, row, col, 0, 1, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)


@triton.jit
def gemm_tile_part(
    x, w, row, col, part, parts, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile's sum over one of so many `parts` of K."""
    k_tiles = tl.cdiv(K, BLOCK_K)
    k_first, k_last = part * k_tiles // parts, (part + 1) * k_tiles // parts
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if TMA:
        x_desc = tl.make_tensor_descriptor(x, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        for k in range(k_first, k_last):
            x_tile = x_desc.load([row, k * BLOCK_K])
            if LAYOUT_NN:
                acc = multiply_add(x_tile, w.load([k * BLOCK_K, col]), acc)
            else:
                acc = multiply_add(x_tile, w.load([col, k * BLOCK_K]).T, acc)
    else:
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = (col + tl.arange(0, BLOCK_N)).to(tl.int64)
        if LAYOUT_NN:
            w_cols, w_stride = w + cols[None, :], N
        else:
            w_cols, w_stride = w + cols[None, :] * K, 1
        for k in range(k_first, k_last):
            ks = (k * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
            x_tile = tl.load(
                x + rows[:, None] * K + ks[None, :],
                mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0,
            )  # fmt: skip
            w_tile = tl.load(
                w_cols + ks[:, None] * w_stride,
                mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0,
            )  # fmt: skip
            acc = multiply_add(x_tile, w_tile, acc)
    return acc


@triton.jit
def store_tile(
    out, acc, row, col, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Round the tile to the dtype of `out` and store what lies within [M, N].

    A TMA store is not complete on return.
    """
    value = acc.to(out.dtype.element_ty)
    if TMA:
        out_desc = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
        out_desc.store([row, col], value)
    else:
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        cols = col + tl.arange(0, BLOCK_N)
        tl.store(
            out + rows[:, None] * N + cols[None, :], value,
            mask=(rows[:, None] < M) & (cols[None, :] < N),
        )  # fmt: skip


@triton.jit
def experts_operand(
    w, w_first, w_pitch, N, K, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """w of all experts, or its descriptor as [rows, K], made once for all tiles of a CTA.

    In [K, N] a k-tile could reach into the next expert, so there each tile makes its own.
    """
    if TMA and not LAYOUT_NN:
        rows = tl.maximum(w_first, (EXPERTS - 1) * w_pitch) + N
        operand = tl.make_tensor_descriptor(w, [rows, K], [K, 1], [BLOCK_N, BLOCK_K])
    else:
        operand = w
    return operand


@triton.jit
def expert_tile(
    x, w, expert, w_first, w_pitch, row, col, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N] of x @ w of `expert` at (row, col); what lies outside M and N is not
    stored. `w` is what `experts_operand` gives.
    """
    first = w_first + expert * w_pitch
    if TMA and not LAYOUT_NN:
        # beyond N lie columns of others, which are not stored
        acc = gemm_tile(x, w, row, col + first, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    else:
        columns = N if LAYOUT_NN else K
        right = w_operand(w + first.to(tl.int64) * columns, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
        acc = gemm_tile(x, right, row, col, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    return acc
