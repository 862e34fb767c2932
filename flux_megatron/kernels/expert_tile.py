"""One output tile of one expert's GEMM: `gemm_tile` on w [E, N, K], or [E, K, N] (LAYOUT_NN).

The matrix of `expert` begins `w_first + expert * w_pitch` rows behind w (`expert_weights`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.gemm_tile import gemm_tile, w_operand


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
