"""The public operations: plain functions, and torch's `operators` where something traces a call.
AG+GEMM and GEMM+RS are not differentiable: `nn.functions` joins each to its dual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from flux_megatron import operators
from flux_megatron.dispatch import (
    agreed_empty,
    decide,
    decide_sum,
    gather_refused,
    guard,
    in_memory,
    local_shards,
    refuse,
)
from flux_megatron.overlap import calls, differentiable
from flux_megatron.overlap.library_gemm import blocks_refused
from flux_megatron.overlap.low_latency import MOST_ROWS
from flux_megatron.overlap.operands import (
    awaited,
    dense,
    is_plain,
    local,
    product,
    refuse_forward_mode,
)
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.report import note_fallback
from flux_megatron.problem import Pattern, Plan, plan_text
from flux_megatron.scaling import Scaling, scaling_of
from flux_megatron.symm.groups import given, group_named, name_of

# with what layers take from rooms below
__all__ = [
    "OPERATIONS", "all_gather_gemm", "awaited", "blocks_refused", "differentiable",
    "gather_refused", "gemm_all_reduce", "gemm_reduce_scatter", "gemv_all_reduce", "given",
    "group_named", "guard", "is_plain", "is_traced", "local", "local_shards", "name_of",
    "note_fallback", "phase", "refuse", "run_ag_gemm", "run_gemm_ar", "run_gemm_rs",
]  # fmt: skip


def all_gather_gemm(
    x: Tensor, w: Tensor, group: ProcessGroup, *,
    bias: Tensor | None = None, layout: str = "nt", plan: Plan | None = None,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
) -> Tensor:  # fmt: skip
    """AG+GEMM (FLUX, section 4.2): the all-gather of x hidden behind the GEMM.

        y = torch.cat([x of rank 0, ..., x of rank R-1]) @ w.t() + bias  # "nn": w, not w.t()

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [M / R, K] |
    | w | [N / R, K], or [K, N / R] for "nn" |
    | bias | [N / R] or None |
    | result | [M, N / R] |

    One dtype, one device. Operands with gaps, transposed or at an odd address are copied, which
    `report()` counts. A bias of another dtype is added to y as torch adds it. No rows, no GEMM.
    A DTensor counts as what this rank has of it, if its placement is that of the table; other
    wrappers are refused by name. `ValueError` names what was given and expected;
    `ProblemMismatch`, on every rank, if the ranks' problems differ; `SignalTimeout` if a rank makes
    no call.

    FP8: x is float8_e4m3fn, or float8_e5m2 for a gradient, and w float8_e4m3fn, both "nt", N / R
    and K multiples of 16. `x_scale` and `w_scale`, float32 tensors of one element on the device,
    give the real value, stored value * scale: y is sums * x_scale * w_scale + bias, rounded once
    to `out_dtype` (bfloat16 unless said, float16 or float32), which the bias has too. The caller
    sees to it that all ranks have one `x_scale`, as TransformerEngine does, which reduces the amax
    of x over the group. `split_accumulator` adds the products up in fp32 registers, TE's
    `use_split_accumulator`.

    Blockwise FP8: scales that are matrices, in TransformerEngine's layout: `x_scale`
    [K / 128, M / R], one for each row and 128 of K, and `w_scale` [N / R / 128, K / 128], one for
    128 x 128 of w. Sizes are rounded up, the second ones then to a multiple of 4. `pipelined`
    overlaps them, and the library multiplies.
    """
    x, w, bias = local_shards(Pattern.AG_GEMM, x, w, bias, group, layout)
    scaled = (x_scale, w_scale, out_dtype, split_accumulator)
    scaling = scaling_of(*scaled)
    if scaling is None and bias is not None and bias.dtype != x.dtype and _fits(bias, w, layout):
        return all_gather_gemm(x, w, group, layout=layout, plan=plan) + bias
    if _eager(Pattern.AG_GEMM, x, w, bias):
        return run_ag_gemm(x, w, bias, group, layout=layout, plan=plan, scaling=scaling)
    name, text = name_of(group), plan_text(plan)
    return _all_gather_gemm(x, w, bias, name, group.size(), layout, text, *scaled)


def gemm_reduce_scatter(
    x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt", plan: Plan | None = None,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
) -> Tensor:  # fmt: skip
    """GEMM+RS (FLUX, section 4.1): the scatter hidden behind the GEMM, then an fp32 sum.

        y = sum([x of rank s @ w.t() of rank s for s in range(R)]).chunk(R)[rank]  # "nn": w

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [M, K / R] |
    | w | [N, K / R], or [K / R, N] for "nn" |
    | result | [M / R, N] |

    M must be a multiple of R. Errors as for `all_gather_gemm`. Each rank's partial result is
    rounded to the dtype of x before it travels, as it is for a reduce-scatter of that dtype. FP8 as
    for `all_gather_gemm`, but each rank has scales of its own: its partial result is multiplied by
    them, rounded to `out_dtype` and travels in that.
    """
    x, w, _ = local_shards(Pattern.GEMM_RS, x, w, None, group, layout)
    scaled = (x_scale, w_scale, out_dtype, split_accumulator)
    if _eager(Pattern.GEMM_RS, x, w):
        return run_gemm_rs(x, w, group, layout=layout, plan=plan, scaling=scaling_of(*scaled))
    name, text = name_of(group), plan_text(plan)
    return _gemm_reduce_scatter(x, w, name, group.size(), layout, text, *scaled)


def gemm_all_reduce(
    x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt", plan: Plan | None = None
) -> Tensor:
    """GEMM+AR: a row layer without sequence parallelism; differentiable.

        y = sum([x of rank s @ w.t() of rank s for s in range(R)])  # "nn": w, not w.t()

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [M, K / R] |
    | w | [N, K / R], or [K / R, N] for "nn" |
    | result | [M, N], the same on every rank |

    Errors as for `all_gather_gemm`, rounding as for `gemm_reduce_scatter`. If M is no multiple of R
    only `hopper`, `signalled` and, for few rows, `low_latency` overlap. dy is the same on all
    ranks, so dx = dy @ w and dw = dy.t() @ x need no communication.
    """
    x, w, _ = local_shards(Pattern.GEMM_AR, x, w, None, group, layout)
    if _eager(Pattern.GEMM_AR, x, w):
        return run_gemm_ar(x, w, group, layout=layout, plan=plan)
    return _gemm_all_reduce(x, w, name_of(group), layout, plan_text(plan))


def gemv_all_reduce(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt") -> Tensor:
    """`gemm_all_reduce` of the few rows of a decoding step: M is 1 to 128, `ValueError` for more.

    One kernel (`low_latency`) computes it where ranks share symmetric memory and nothing was
    measured to be faster; for more than 64 rows only where it was measured. With that kernel every
    rank has the same bits, in every run.
    """
    if x.dim() == 2 and x.shape[0] > MOST_ROWS:
        error = f"gemv_all_reduce: {x.shape[0]} rows given, {MOST_ROWS} at most expected"
        refuse(error, group, x.device)
    return gemm_all_reduce(x, w, group, layout=layout)


def _fits(bias: Tensor, w: Tensor, layout: str) -> bool:
    """Whether the bias could be added: else `decide` says what is wrong with it."""
    return (
        w.dim() == 2
        and bias.dtype.is_floating_point
        and bias.device == w.device
        and bias.shape == (w.shape[0 if layout == "nt" else 1],)
    )


def _eager(pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether nothing traces or differentiates the call."""
    if is_traced(pattern):
        return False
    needs = x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
    return not (needs and torch.is_grad_enabled())


def is_traced(name: str) -> bool:
    """Whether torch.compile, fake tensors, a checkpointing policy or functorch must see one
    operator. A transform of functorch wraps what is made under it, outside of an operator's code.
    Forward mode is refused, with the `name` of what is called.
    """
    if is_dynamo_compiling():
        return True
    refuse_forward_mode(name)
    return maybe_current_level() is not None or _len_torch_dispatch_stack() > 0


def run_ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup, *, layout: str = "nt",
    plan: Plan | None = None, consume: Callable[[Tensor], None] | None = None,
    scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """`all_gather_gemm` for callers that need the gathered rows [M, K] too: `consume` borrows them
    and enqueues its reads before it returns.
    """
    x, w, bias = in_memory(Pattern.AG_GEMM, x, w, bias, group)
    if agreed_empty(Pattern.AG_GEMM, x, w, group, layout):
        if consume is not None:
            consume(x)
        return product(x, w, layout)
    decision = decide(Pattern.AG_GEMM, x, w, bias, group, layout, plan, scaling)
    decision.report_fallback()
    scaling = dense(scaling, decision.workspace)
    program = decision.program(x, w, bias, consume is not None, scaling)
    call = calls.InFlight(program, x, w, bias, scaling)
    if consume is not None:
        call.borrow(consume)
    y = call.finish()
    decision.count()
    return y


def _reduced(
    pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt",
    plan: Plan | None = None, scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    x, w, _ = in_memory(pattern, x, w, None, group)
    if agreed_empty(pattern, x, w, group, layout):
        return product(x, w, layout)
    decision, scaling = decide_sum(pattern, x, w, group, layout, plan, scaling)
    program = decision.program(x, w, None, False, scaling)
    y = calls.InFlight(program, x, w, None, scaling).finish()
    decision.count()
    return y


# `gemm_reduce_scatter` and `gemm_all_reduce` without torch's operator
run_gemm_rs = partial(_reduced, Pattern.GEMM_RS)
run_gemm_ar = partial(_reduced, Pattern.GEMM_AR)

_all_gather_gemm = operators.all_gather_gemm(run_ag_gemm)
_gemm_reduce_scatter = operators.gemm_reduce_scatter(run_gemm_rs)
_gemm_all_reduce = operators.gemm_all_reduce(run_gemm_ar)


# the operation of each pattern
OPERATIONS = {
    Pattern.AG_GEMM: all_gather_gemm,
    Pattern.GEMM_RS: gemm_reduce_scatter,
    Pattern.GEMM_AR: gemm_all_reduce,
}
