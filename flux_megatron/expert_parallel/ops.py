"""The public operations of expert parallelism: torch custom operators, each the other's backward.

Ranks hold E experts each. A rank has rows for experts of all ranks, sorted by (rank, its expert);
`counts` says how many for each, on the device; with `fused` no host waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.dispatch import refuse_wrappers
from flux_megatron.expert_parallel import call
from flux_megatron.expert_parallel.wgrad import weight_gradient
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.overlap.operands import memory
from flux_megatron.problem import Plan, plan_of, plan_text
from flux_megatron.symm.groups import group_named, name_of


def a2a_gemm(
    x: Tensor, w: Tensor, counts: Tensor, group: ProcessGroup, *,
    capacity: int, layout: str = "nt", plan: Plan | None = None, reverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All-to-all + GEMM: tokens travel to their experts, and are multiplied there.

        rows = all_to_all(x, counts.sum(1)), sorted by (expert, source rank)
        y = torch.cat([rows of expert e @ w[e].t() for e in range(E)])  # "nn": w[e]

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [T, K], T may differ from rank to rank and be 0 |
    | w | [E, N, K], or [E, K, N] for "nn"; rows contiguous, whole rows between two experts |
    | counts | int32 [R, E]: rows of x for each expert of each rank; they add up to T |
    | result | y [capacity, N], 0 behind the rows that came; int32 [R, E]: rows from each rank |

    With `reverse` the matrices of w lie in reverse: w[-1] is that of the first expert.
    `capacity` bounds the rows that a rank sends or receives, and is the same on all ranks. Where
    more come, or counts do not add up to T, `CapacityExceeded` on every rank: at the next call or
    check on GPUs, because only the device knows. `ValueError`, `ProblemMismatch` and
    `SignalTimeout` as for `all_gather_gemm`. Differentiable in x and w.
    """
    refuse_wrappers("a2a_gemm", group, x=x, w=w, counts=counts)
    keep = torch.is_grad_enabled() and w.requires_grad
    y, received, _ = _a2a_gemm(
        x, w, counts, capacity, name_of(group), layout, plan_text(plan), keep, reverse
    )
    return y, received


def gemm_a2a(
    x: Tensor, w: Tensor, counts: Tensor, group: ProcessGroup, *,
    tokens: int, layout: str = "nt", plan: Plan | None = None, reverse: bool = False,
) -> Tensor:  # fmt: skip
    """GEMM + all-to-all: rows are multiplied by their experts, and travel back.

        rows = torch.cat([rows of expert e in x @ w[e].t() for e in range(E)])  # "nn": w[e]
        y = all_to_all(rows sorted by (source rank, expert))

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [capacity, K], sorted by (expert, source rank), as `a2a_gemm` gives it |
    | w | [E, N, K], or [E, K, N] for "nn", as for `a2a_gemm` |
    | counts | int32 [R, E], as `a2a_gemm` was given it |
    | result | y [tokens, N], in the order in which this rank had sent them |

    `reverse` and errors as for `a2a_gemm`. Differentiable in x and w.
    """
    refuse_wrappers("gemm_a2a", group, x=x, w=w, counts=counts)
    return _gemm_a2a(x, w, counts, tokens, name_of(group), layout, plan_text(plan), reverse)


@torch.library.custom_op("flux_megatron::a2a_gemm", mutates_args=())
def _a2a_gemm(
    x: Tensor, w: Tensor, counts: Tensor, capacity: int, group: str, layout: str, plan: str,
    keep: bool, reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, w = memory("x", x), memory("w", w, contiguous=False)
    decision = call.decide(
        "a2a_gemm", x, w, counts, group_named(group), len(x), capacity, layout, plan_of(plan)
    )
    decision.report_fallback()
    with decision.workspace.guard(whole=True):
        made = decision.strategy.a2a_gemm(
            x, ExpertWeights(w, reverse), counts, capacity, layout, keep, decision.plan,
            decision.workspace,
        )  # fmt: skip
    decision.count()
    return made


@_a2a_gemm.register_fake
def _(x, w, counts, capacity, group, layout, plan, keep, reverse=False):
    y = x.new_empty(capacity, w.shape[1] if layout == "nt" else w.shape[2])
    return y, torch.empty_like(counts), x.new_empty(capacity if keep else 0, x.shape[1])


@torch.library.custom_op("flux_megatron::gemm_a2a", mutates_args=())
def _gemm_a2a(
    x: Tensor, w: Tensor, counts: Tensor, tokens: int, group: str, layout: str, plan: str,
    reverse: bool = False,
) -> Tensor:  # fmt: skip
    x, w = memory("x", x), memory("w", w, contiguous=False)
    decision = call.decide(
        "gemm_a2a", x, w, counts, group_named(group), tokens, len(x), layout, plan_of(plan)
    )
    decision.report_fallback()
    with decision.workspace.guard(whole=True):
        y = decision.strategy.gemm_a2a(
            x, ExpertWeights(w, reverse), counts, tokens, layout, decision.plan, decision.workspace
        )
    decision.count()
    return y


@_gemm_a2a.register_fake
def _(x, w, counts, tokens, group, layout, plan, reverse=False):
    return x.new_empty(tokens, w.shape[1] if layout == "nt" else w.shape[2])


@torch.library.custom_op("flux_megatron::expert_wgrad", mutates_args=())
def _wgrad(a: Tensor, b: Tensor, received: Tensor) -> Tensor:
    return weight_gradient(a, b, received)


@_wgrad.register_fake
def _(a, b, received):
    return a.new_empty(received.shape[1], a.shape[1], b.shape[1])


def _other(layout: str) -> str:
    """How the same matrix is read in backward."""
    return "nn" if layout == "nt" else "nt"


def _gradient_of_w(x: Tensor, dy: Tensor, received: Tensor, layout: str, reverse: bool) -> Tensor:
    """dw of y = x @ w, over the rows that experts have received: `received` [R, E] of them."""
    dw = _wgrad(dy, x, received) if layout == "nt" else _wgrad(x, dy, received)
    return dw.flip(0) if reverse else dw


def _save_a2a_gemm(ctx, inputs, output) -> None:
    x, w, counts, _, *ctx.options, _, ctx.reverse = inputs
    _, received, rows = output
    ctx.mark_non_differentiable(received, rows)
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, counts, received, rows)


def _a2a_gemm_backward(ctx, dy: Tensor, *_):
    w, counts, received, rows = ctx.saved_tensors
    group, layout, plan = ctx.options
    dy = dy.contiguous()
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _gemm_a2a(dy, w, counts, ctx.tokens, group, _other(layout), plan, ctx.reverse)
    if ctx.needs_input_grad[1]:
        dw = _gradient_of_w(rows, dy, received, layout, ctx.reverse)
    return dx, dw, *(None,) * 7


def _save_gemm_a2a(ctx, inputs, output) -> None:
    x, w, counts, _, *ctx.options, ctx.reverse = inputs
    ctx.capacity = x.shape[0]
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w, counts)


def _gemm_a2a_backward(ctx, dy: Tensor):
    x, w, counts = ctx.saved_tensors
    group, layout, plan = ctx.options
    needs_dw = ctx.needs_input_grad[1]
    dx, received, rows = _a2a_gemm(
        dy.contiguous(), w, counts, ctx.capacity, group, _other(layout), plan, needs_dw, ctx.reverse
    )
    dw = _gradient_of_w(x, rows, received, layout, ctx.reverse) if needs_dw else None
    return dx, dw, *(None,) * 6


_a2a_gemm.register_autograd(_a2a_gemm_backward, setup_context=_save_a2a_gemm)
_gemm_a2a.register_autograd(_gemm_a2a_backward, setup_context=_save_gemm_a2a)
