"""Tiles whose K is cut into parts, which CTAs multiply side by side (split-K).

Each part leaves its fp32 sums in memory and is counted; the CTA that counts the last part of a tile
adds them up in the order of the parts, so the bits do not depend on who comes last. Nobody waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.gemm_tile import gemm_tile_part
from flux_megatron.kernels.primitives import count_acq_rel_gpu


@triton.jit
def product(
    x, w, work_tile, partials, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of all rows, fp32 [BLOCK_M, BLOCK_N], and True; for a part whose tile still lacks
    others anything and False. The tile is `work_tile` // PARTS.
    """
    tile, part = work_tile // PARTS, work_tile % PARTS
    acc = gemm_tile_part(
        x, w, 0, tile * BLOCK_N, part, PARTS, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
    )
    whole = part >= 0
    if PARTS > 1:
        acc, whole = sum_of_parts(acc, tile, part, partials, counters, M, BLOCK_M, BLOCK_N, PARTS)
    return acc, whole


@triton.jit
def sum_of_parts(
    acc, tile, part, partials, counters, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Leave a part's sums; for the last that comes the sum of all and True, else anything and
    False. `partials`, fp32 [tiles, PARTS, BLOCK_M, BLOCK_N], has the first M rows of each part.
    """
    rows = tl.arange(0, BLOCK_M)[:, None]
    at = rows * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    partials += tile * (PARTS * BLOCK_M * BLOCK_N)
    tl.store(partials + part * (BLOCK_M * BLOCK_N) + at, acc, mask=rows < M)
    last = count_acq_rel_gpu(counters + tile, PARTS)  # count [C]
    if last:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for one in tl.static_range(PARTS):
            # past L1: other SMs have stored them
            acc += tl.load(
                partials + one * (BLOCK_M * BLOCK_N) + at, mask=rows < M, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
    return acc, last
