"""The reference: every pattern over a list of shards, wgrad, and the norms, in plain torch, in one
process and without collectives.

Tests, benchmarks and docs compare with these functions. `x[r], w[r]` belong to rank r, so does
entry r of the result. GEMMs are computed in fp32 (fp64 for fp64 operands) and rounded once to the
operands' type per rank, as a rank's local GEMM does; sums over ranks are fp32 in rank order,
rounded once. The norms compute in fp32 (fp64 for fp64 operands) and round once; their gradients are
autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from flux_megatron.patterns import Pattern

Shards = Sequence[Tensor]  # one a rank


def matmul(x: Tensor, w: Tensor, layout: str = "nt") -> Tensor:
    """x [M,K] times w ([N,K] for "nt", [K,N] for "nn") in fp32 or wider: [M,N], not yet rounded."""
    wide = _wide(x.dtype)
    right = w.t() if layout == "nt" else w
    return x.to(wide) @ right.to(wide)


def all_gather_gemm(
    x: Shards, w: Shards, layout: str = "nt", bias: Shards | None = None,
    x_scale: Shards | None = None, w_scale: Shards | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """x[r] [M/R, K], w[r] [N/R, K]  ->  y[r] [M, N/R] = cat(x) @ w[r]^T (+ bias[r]).

    FP8: times x_scale[r], which all ranks have, and w_scale[r] before the bias; in out_dtype. With
    blockwise scales, matrices, each element times that of its block.
    """
    x, w, x_scale, w_scale = _without_blocks(x, w, x_scale, w_scale)
    gathered = torch.cat([one.to(_wide(one.dtype)) for one in x])
    y = [_scaled_by(matmul(gathered, w[r], layout), x_scale, w_scale, r) for r in range(len(w))]
    if bias is not None:
        y = [out + b.to(out.dtype) for out, b in zip(y, bias, strict=True)]
    return [out.to(out_dtype or x[0].dtype) for out in y]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def _scaled_by(y: Tensor, x_scale: Shards | None, w_scale: Shards | None, rank: int) -> Tensor:
    return y if x_scale is None or w_scale is None else y * x_scale[rank] * w_scale[rank]


def _without_blocks(x: Shards, w: Shards, x_scale: Shards | None, w_scale: Shards | None) -> tuple:
    """The same operands, real values in place of those with blockwise scales: x_scale[r]
    [K / 128, M], w_scale[r] [N / 128, K / 128], both as long as that or longer.
    """
    if x_scale is None or w_scale is None or x_scale[0].dim() < 2:
        return x, w, x_scale, w_scale
    k = torch.arange(x[0].shape[1]) // 128
    x = [one.to(_wide(one.dtype)) * s.t()[: len(one), k] for one, s in zip(x, x_scale, strict=True)]
    n = torch.arange(w[0].shape[0]) // 128
    w = [one.to(_wide(one.dtype)) * s[n][:, k] for one, s in zip(w, w_scale, strict=True)]
    return x, w, None, None


def _sum_in_rank_order(
    x: Shards, w: Shards, layout: str, x_scale: Shards | None = None,
    w_scale: Shards | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    dtype = out_dtype or x[0].dtype
    x, w, x_scale, w_scale = _without_blocks(x, w, x_scale, w_scale)
    partials = (
        _scaled_by(matmul(x[r], w[r], layout), x_scale, w_scale, r).to(dtype).to(_wide(dtype))
        for r in range(len(x))
    )
    return reduce(torch.add, partials).to(dtype)


def gemm_reduce_scatter(
    x: Shards, w: Shards, layout: str = "nt", x_scale: Shards | None = None,
    w_scale: Shards | None = None, out_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """x[r] [M, K/R], w[r] [N, K/R]  ->  y[r] [M/R, N] = rows r of sum over s of x[s] @ w[s]^T.

    FP8: each of these times x_scale[s] and w_scale[s], rounded to out_dtype before the sum.
    """
    return list(_sum_in_rank_order(x, w, layout, x_scale, w_scale, out_dtype).chunk(len(x)))


def gemm_all_reduce(x: Shards, w: Shards, layout: str = "nt") -> list[Tensor]:
    """x[r] [M, K/R], w[r] [N, K/R]  ->  y[r] [M, N] = sum over s of x[s] @ w[s]^T, the same on
    every rank.
    """
    total = _sum_in_rank_order(x, w, layout)
    return [total.clone() for _ in x]


def a2a_gemm(
    x: Shards, w: Shards, counts: Shards, capacity: int, layout: str = "nt"
) -> tuple[list[Tensor], list[Tensor]]:
    """x[r] [T_r, K] sorted by (rank, its expert), w[r] [E, N, K], counts[r] int [R, E]  ->  y[r]
    [capacity, N] and the received rows [capacity, K], both sorted by (expert, source rank).

    Rows that nobody sent are 0.
    """
    pieces = [torch.split(rows, n.flatten().tolist()) for rows, n in zip(x, counts, strict=True)]
    ys, received = [], []
    for rank, experts in enumerate(w):
        E, rows = len(experts), x[0].new_zeros(capacity, x[0].shape[1])
        arrived = [(pieces[s][rank * E + e], experts[e]) for e in range(E) for s in range(len(x))]
        y = [matmul(piece, expert, layout).to(x[0].dtype) for piece, expert in arrived]
        came = sum(len(piece) for piece, _ in arrived)
        rows[:came] = torch.cat([piece for piece, _ in arrived])
        received.append(rows)
        ys.append(torch.cat([*y, y[0].new_zeros(capacity - came, y[0].shape[1])]))
    return ys, received


def gemm_a2a(x: Shards, w: Shards, counts: Shards, layout: str = "nt") -> list[Tensor]:
    """x[r] [capacity, K] sorted by (own expert, source rank), w[r] [E, N, K], counts[r] int [R, E]
    of `a2a_gemm`  ->  y[r] [T_r, N], in the order in which rank r had sent its rows.
    """
    R, E = len(x), len(w[0])
    pieces: dict[tuple[int, int, int], Tensor] = {}
    for rank in range(R):
        sizes = [int(counts[source][rank, e]) for e in range(E) for source in range(R)]
        rows = torch.split(x[rank][: sum(sizes)], sizes)
        for number, piece in enumerate(rows):
            e, source = divmod(number, R)
            pieces[source, rank, e] = matmul(piece, w[rank][e], layout).to(x[rank].dtype)
    return [
        torch.cat([pieces[source, rank, e] for rank in range(R) for e in range(E)])
        for source in range(R)
    ]


def send_tokens(x: Shards, chosen: Shards) -> list[Tensor]:
    """x[r] [T, K], chosen[r] bool [T, R E]  ->  rows[r] [rows, K]: each token once for each expert
    of rank r that it has chosen, sorted by (expert, source rank, token).
    """
    E = chosen[0].shape[1] // len(x)
    return [
        torch.cat([x[s][chosen[s][:, rank * E + e]] for e in range(E) for s in range(len(x))])
        for rank in range(len(x))
    ]


def weights_of_rows(weights: Shards, chosen: Shards) -> list[Tensor]:
    """weights[r] [T, R E]  ->  one for each row of `send_tokens` [rows]."""
    R, E = len(chosen), chosen[0].shape[1] // len(chosen)
    return [
        torch.cat([weights[s][chosen[s][:, n], n] for n in own for s in range(R)])
        for own in (range(rank * E, rank * E + E) for rank in range(R))
    ]


def give_back_tokens(rows: Shards, chosen: Shards) -> list[Tensor]:
    """rows[r] as `send_tokens` gives them  ->  y[r] [T, N]: the sum of a token's rows on each rank
    in the order of experts, rounded, then of the ranks in their order.
    """
    R, E, wide = len(rows), chosen[0].shape[1] // len(rows), _wide(rows[0].dtype)
    partials: dict[tuple[int, int], Tensor] = {}
    for rank, made in enumerate(rows):
        sizes = [int(chosen[s][:, rank * E + e].sum()) for e in range(E) for s in range(R)]
        pieces = made.to(wide).split(sizes)
        for s in range(R):
            total = made.new_zeros(len(chosen[s]), made.shape[1], dtype=wide)
            for e in range(E):
                tokens = chosen[s][:, rank * E + e].nonzero().flatten()
                total = total.index_add(0, tokens, pieces[e * R + s])
            partials[rank, s] = total.to(made.dtype).to(wide)
    return [
        reduce(torch.add, (partials[rank, s] for rank in range(R))).to(rows[0].dtype)
        for s in range(R)
    ]


def embedding_all_to_all(
    weight: Shards, indices: Shards, offsets: Shards, mode: str = "sum"
) -> list[Tensor]:
    """weight[r] [T_r, rows, D], indices[r] [nnz], offsets[r] [T_r * B + 1]  ->  y[r] [B/R, T, D]:
    the sum or mean of each bag, in fp32 (fp64 for fp64), for samples r of all tables.
    """
    tables = []
    for w, index, offset in zip(weight, indices, offsets, strict=True):
        bags = torch.tensor_split(index, offset[1:-1])
        batch = len(bags) // len(w)
        for table, rows in enumerate(w.to(torch.promote_types(w.dtype, torch.float32))):
            sums = [rows[bag].sum(0) for bag in bags[table * batch : (table + 1) * batch]]
            lengths = offset.diff()[table * batch : (table + 1) * batch].clamp(min=1)
            pooled = torch.stack(sums) / (lengths[:, None] if mode == "mean" else 1)
            tables.append(pooled.to(w.dtype))
    return list(torch.stack(tables, 1).chunk(len(weight)))


# what each pattern computes: (x, w, layout) -> y
PATTERNS: Mapping[Pattern, Callable[..., list[Tensor]]] = {
    Pattern.AG_GEMM: all_gather_gemm,
    Pattern.GEMM_RS: gemm_reduce_scatter,
    Pattern.GEMM_AR: gemm_all_reduce,
}


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """dw [N, K] = dy^T x for all rows of dy [M, N] and x [M, K]; in fp32 or wider, not rounded."""
    return matmul(dy.t(), x, "nn")


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    eps: float, zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """x [..., N] less the mean of its row, then as `rms_norm`; plus bias [N]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = _scaled(wide - wide.mean(-1, keepdim=True), weight, eps, zero_centered)
    return (y if bias is None else y + bias).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = False) -> Tensor:
    """x [..., N] / sqrt(mean of x^2 in its row + eps) * weight [N], or * (1 + weight)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _scaled(wide, weight, eps, zero_centered).to(weight.dtype)


def _scaled(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    gamma = weight.to(x.dtype) + (1.0 if zero_centered else 0.0)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
