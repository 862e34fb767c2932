"""The public operations.

They are torch custom operators, which torch.compile keeps whole. AG+GEMM and GEMM+RS are not
differentiable: `nn.functions` joins each to its dual. The functions below them are the same
operations in pieces, for the schedules of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup, distributed_c10d

from flux_megatron import settings
from flux_megatron.dispatch import (
    decide,
    gather_refused,
    guard,
    refuse,
    refuse_wrappers,
    undecided,
)
from flux_megatron.overlap import calls, differentiable
from flux_megatron.overlap.low_latency import MOST_ROWS
from flux_megatron.overlap.operands import awaited, is_plain, local, memory
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.report import Layers, note_fallback, note_layers
from flux_megatron.overlap.sequential import blocks_refused
from flux_megatron.problem import Pattern, Plan
from flux_megatron.scaling import Scaling, is_fp8
from flux_megatron.symm.groups import name_of

# with what layers and experts take from rooms below
__all__ = [
    "OPERATIONS", "Layers", "all_gather_gemm", "awaited", "blocks_refused", "differentiable",
    "gather_refused", "gemm_all_reduce", "gemm_reduce_scatter", "gemv_all_reduce", "group_named",
    "guard", "is_plain", "is_traced", "local", "local_shards", "note_fallback", "note_layers",
    "phase", "plan_of", "plan_text", "refuse", "refuse_wrappers", "run_ag_gemm", "run_gemm_ar",
    "run_gemm_rs", "start_gather", "start_gather_and_gemm_rs", "start_gather_beside",
    "start_gemm_ar", "start_gemm_rs",
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
    `report()` counts. A bias of another dtype is added to y as torch adds it. No rows, no call.
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
    scaling = _scaling(*scaled)
    if scaling is None and bias is not None and bias.dtype != x.dtype and _fits(bias, w, layout):
        return all_gather_gemm(x, w, group, layout=layout, plan=plan) + bias
    if _eager(x, w):
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
    if _eager(x, w):
        return run_gemm_rs(x, w, group, layout=layout, plan=plan, scaling=_scaling(*scaled))
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
    if _eager(x, w):
        return run_gemm_ar(x, w, group, layout=layout, plan=plan)
    return _gemm_all_reduce(x, w, name_of(group), layout, plan_text(plan))


def gemv_all_reduce(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt") -> Tensor:
    """`gemm_all_reduce` of the few rows of a decoding step: M is 1 to 128, `ValueError` for more.

    One kernel (`low_latency`) computes it where ranks share symmetric memory and nothing was
    measured to be faster; for more than 64 rows only where it was measured. With that kernel every
    rank has the same bits, in every run.
    """
    if x.dim() == 2 and x.shape[0] > MOST_ROWS:
        name_of(group)
        error = f"gemv_all_reduce: {x.shape[0]} rows given, {MOST_ROWS} at most expected"
        refuse(error, group, x.device)
    return gemm_all_reduce(x, w, group, layout=layout)


def local_shards(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup, layout: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands, of DTensors what this rank has. Differentiable; refuses other placements."""
    if is_plain(x) and is_plain(w) and (bias is None or is_plain(bias)):
        return x, w, bias
    name = name_of(group)
    gathers = pattern.spec.gathers
    try:
        x = local("x", x, 0 if gathers else -1, name)
        w = local("w", w, 0 if gathers == (layout == "nt") else 1, name)
        bias = bias if bias is None else local("bias", bias, 0, name)
    except ValueError as error:
        refuse(f"{pattern}: {error}", group, x.device)
    return x, w, bias


def _scaling(
    x_scale: Tensor | None, w_scale: Tensor | None, out_dtype: torch.dtype | None, split: bool
) -> Scaling | None:
    """None for a call that names nothing of FP8. `decide` says what one lacks that does."""
    if x_scale is None and w_scale is None and out_dtype is None and not split:
        return None
    blockwise = all(isinstance(one, Tensor) and one.numel() > 1 for one in (x_scale, w_scale))
    dtype, split = out_dtype or torch.bfloat16, split or blockwise
    return Scaling(x_scale, w_scale, dtype, split, blockwise)  # type: ignore[arg-type]


def _dense(scaling: Scaling | None) -> Scaling | None:
    """With blockwise scales that copy engines can read."""
    if scaling is None or not scaling.blockwise:
        return scaling
    return Scaling(memory("x_scale", scaling.x), memory("w_scale", scaling.w), *scaling[2:])


def _fits(bias: Tensor, w: Tensor, layout: str) -> bool:
    """Whether the bias could be added: else `decide` says what is wrong with it."""
    return (
        w.dim() == 2
        and bias.dtype.is_floating_point
        and bias.device == w.device
        and bias.shape == (w.shape[0 if layout == "nt" else 1],)
    )


def _eager(x: Tensor, w: Tensor) -> bool:
    """Whether nothing traces or differentiates the call: then a function is cheaper for the host
    than an operator.
    """
    if is_traced():
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))


def is_traced() -> bool:
    """Whether torch.compile, fake tensors, a checkpointing policy or functorch must see one
    operator. A transform of functorch wraps what is made under it, outside of an operator's code.
    """
    if is_dynamo_compiling() or _len_torch_dispatch_stack() > 0:
        return True
    return maybe_current_level() is not None


def group_named(name: str) -> ProcessGroup:
    """The group of this `group_name`, which operators take instead of the group."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


# Whoever keeps compiled graphs on disk finds them by their operators' arguments. So the R ranks of
# the group, by which shapes differ, are one: a group of another size may have the same name.


@torch.library.custom_op("flux_megatron::all_gather_gemm", mutates_args=())
def _all_gather_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, group: str, R: int, layout: str, plan: str,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
) -> Tensor:  # fmt: skip
    scaling = _scaling(x_scale, w_scale, out_dtype, split_accumulator)
    ranks, given = group_named(group), plan_of(plan)
    return run_ag_gemm(x, w, bias, ranks, layout=layout, plan=given, scaling=scaling)


@_all_gather_gemm.register_fake
def _(x, w, bias, group, R, layout, plan, x_scale=None, w_scale=None, out_dtype=None, split=False):
    N = w.shape[0] if layout == "nt" else w.shape[1]
    return x.new_empty(x.shape[0] * R, N, dtype=_made_dtype(x, out_dtype))


@torch.library.custom_op("flux_megatron::gemm_reduce_scatter", mutates_args=())
def _gemm_reduce_scatter(
    x: Tensor, w: Tensor, group: str, R: int, layout: str, plan: str,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
) -> Tensor:  # fmt: skip
    scaling = _scaling(x_scale, w_scale, out_dtype, split_accumulator)
    ranks, given = group_named(group), plan_of(plan)
    return run_gemm_rs(x, w, ranks, layout=layout, plan=given, scaling=scaling)


@_gemm_reduce_scatter.register_fake
def _(x, w, group, R, layout, plan, x_scale=None, w_scale=None, out_dtype=None, split=False):
    N = w.shape[0] if layout == "nt" else w.shape[1]
    return x.new_empty(x.shape[0] // R, N, dtype=_made_dtype(x, out_dtype))


def _made_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if is_fp8(x) else x.dtype)


@torch.library.custom_op("flux_megatron::gemm_all_reduce", mutates_args=())
def _gemm_all_reduce(x: Tensor, w: Tensor, group: str, layout: str, plan: str) -> Tensor:
    return run_gemm_ar(x, w, group_named(group), layout=layout, plan=plan_of(plan))


@_gemm_all_reduce.register_fake
def _(x, w, group, layout, plan):
    return x.new_empty(x.shape[0], w.shape[0] if layout == "nt" else w.shape[1])


def _keep_operands(ctx, inputs, output) -> None:
    x, w, ctx.group, ctx.layout, _ = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _local_gradients(ctx, dy: Tensor):
    x, w = ctx.saved_tensors
    if torch.is_grad_enabled():  # to be differentiated again: dy is that of all ranks
        dy = differentiable.copy(dy, group_named(ctx.group))
    nt = ctx.layout == "nt"
    dx = None if w is None else dy @ (w if nt else w.t())
    dw = None if x is None else (dy.t() @ x if nt else x.t() @ dy)
    return dx, dw, None, None, None


_gemm_all_reduce.register_autograd(_local_gradients, setup_context=_keep_operands)


def plan_text(plan: Plan | None) -> str:
    return plan.dumps() if plan else ""


# Dynamo cannot trace the JSON encoder. This line does what `assume_constant_result` of
# torch.compiler does, without importing Dynamo: 2 of the 7 s that a rank's imports take.
plan_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def plan_of(text: str) -> Plan | None:
    return Plan.loads(text) if text else None


# the operation of each pattern
OPERATIONS: dict[Pattern, Callable[..., Tensor]] = {
    Pattern.AG_GEMM: all_gather_gemm,
    Pattern.GEMM_RS: gemm_reduce_scatter,
    Pattern.GEMM_AR: gemm_all_reduce,
}


def _memory(pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    try:
        return memory("x", x), memory("w", w)
    except ValueError as error:
        refuse(f"{pattern}: {error}", group, x.device)


def _no_rows(x: Tensor, w: Tensor, layout: str) -> bool:
    """Whether no rank has rows, as shards are equal: then nobody is asked. Of other errors `decide`
    tells.
    """
    if x.shape[0] or x.dim() != 2 or w.dim() != 2 or 0 in w.shape:
        return False
    if x.dtype != w.dtype or is_fp8(x):
        return False
    return x.shape[1] == w.shape[1 if layout == "nt" else 0]


def _product(x: Tensor, w: Tensor, layout: str) -> Tensor:
    return x @ (w.t() if layout == "nt" else w)


class _Made:
    """A call in pieces of no rows: there is nothing to wait for."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def finish(self) -> Tensor:
        return self._result

    complete = finish

    def close(self) -> None: ...


def run_ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup, *, layout: str = "nt",
    plan: Plan | None = None, consume: Callable[[Tensor], None] | None = None,
    scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """`all_gather_gemm` for callers that need the gathered rows [M, K] too: `consume` borrows them
    and enqueues its reads before it returns.
    """
    x, w = _memory(Pattern.AG_GEMM, x, w, group)
    if _no_rows(x, w, layout):
        if consume is not None:
            consume(x)
        return _product(x, w, layout)
    bias = bias if bias is None else memory("bias", bias)
    decision = decide(Pattern.AG_GEMM, x, w, bias, group, layout, plan, scaling)
    decision.report_fallback()
    plan, space, scaling = decision.plan, decision.workspace, _dense(scaling)
    with decision.guard():
        y = decision.strategy.ag_gemm(x, w, bias, layout, plan, space, consume, scaling)
    decision.count()
    return y


def _reduced(
    pattern: Pattern, function: str, x: Tensor, w: Tensor, group: ProcessGroup, *,
    layout: str = "nt", plan: Plan | None = None, scaling: Scaling | None = None,
) -> Any:  # fmt: skip
    """What this function of the chosen strategy gives."""
    x, w = _memory(pattern, x, w, group)
    if _no_rows(x, w, layout):
        y = _product(x, w, layout)
        return _Made(y) if function.startswith("start") else y
    if scaling and settings.get().fp8_wire:
        scaling = scaling._replace(wire=True)
    decision = decide(pattern, x, w, None, group, layout, plan, scaling)
    decision.report_fallback()
    scaled = (_dense(scaling),) if scaling else ()
    plan, space = decision.plan, decision.workspace
    with decision.guard():
        made = getattr(decision.strategy, function)(x, w, layout, plan, space, *scaled)
    decision.count()
    return made


# `gemm_reduce_scatter` and `gemm_all_reduce` without torch's operator
run_gemm_rs = partial(_reduced, Pattern.GEMM_RS, "gemm_rs")
run_gemm_ar = partial(_reduced, Pattern.GEMM_AR, "gemm_ar")
# The same in two steps: the `finish` of what these return gives the result. The caller may enqueue
# other work in between.
start_gemm_rs = partial(_reduced, Pattern.GEMM_RS, "start_gemm_rs")
start_gemm_ar = partial(_reduced, Pattern.GEMM_AR, "start_gemm_ar")


def start_gather(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt"):
    """Gather x as `run_ag_gemm(x, w, ...)` does, in the background. The result's `complete` gives
    the rows [M, K], borrowed until its `close`.
    """
    x, w = _memory(Pattern.AG_GEMM, x, w, group)
    if _no_rows(x, w, layout):
        return _Made(x)
    decision = decide(Pattern.AG_GEMM, x, w, None, group, layout, None)
    with decision.guard():
        return decision.strategy.start_gather(x, decision.plan, decision.workspace)


def start_gather_and_gemm_rs(x: Tensor, dy: Tensor, w: Tensor, group: ProcessGroup):
    """The first half of a column layer's backward: the results of `start_gather(x, w)` and of
    `start_gemm_rs(dy, w, layout="nn")`, under one plan.

    The strategy of the GEMM+RS also gathers x [M / R, K].
    """
    dy, w = _memory(Pattern.GEMM_RS, dy, w, group)
    x = memory("x", x)
    if _no_rows(dy, w, "nn"):
        return _Made(x), _Made(_product(dy, w, "nn"))
    decision = decide(Pattern.GEMM_RS, dy, w, None, group, "nn", None)
    decision.report_fallback()
    strategy, space, gather_plan = decision.strategy, decision.workspace, decision.gather_plan()
    with space.guard():  # the gather is open if the scatter cannot begin
        gather = strategy.start_gather(x, gather_plan, space)
        scatter = strategy.start_gemm_rs(dy, w, "nn", decision.plan, space)
    decision.count()
    return gather, scatter


def start_gather_beside(x: Tensor, scales: Tensor | None, group: ProcessGroup) -> calls.InFlight:
    """Gather x [rows, columns] of any dtype by copy engines, while other calls run. The result's
    `complete` gives the rows of every rank [R * rows, columns], and once more the `scales`, where
    there are any, of each rank behind the others'. Both are borrowed until its `finish`.
    """
    x, scaling = memory("x", x), None
    if scales is not None:
        scales = memory("scales", scales)
        scaling = Scaling(scales, scales, x.dtype, False, True)
    space = undecided(group, x.device, f"gather of {[*x.shape]} {x.dtype} beside other calls")
    return calls.start_gather_beside(x, scaling, space)
