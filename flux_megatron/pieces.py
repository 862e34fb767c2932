"""The operations in two steps, for the schedules of backward: the caller may enqueue other work
between the start of a call and its `finish`, which gives the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.dispatch import agreed_empty, decide, decide_sum, entered, in_memory
from flux_megatron.overlap import calls, registry
from flux_megatron.overlap.gather import gather_beside
from flux_megatron.overlap.operands import memory, product
from flux_megatron.problem import Pattern, Plan
from flux_megatron.scaling import Scaling

_BESIDE = Plan("pipelined")


@dataclass(frozen=True)
class Done:
    """Stands for a call of no rows: its result is there."""

    result: Tensor

    def complete(self) -> Tensor:
        return self.result

    finish = complete

    def close(self) -> None: ...


def _start(
    pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt",
    plan: Plan | None = None, scaling: Scaling | None = None,
) -> calls.InFlight | Done:  # fmt: skip
    x, w, _ = in_memory(pattern, x, w, None, group)
    if agreed_empty(pattern, x, w, group, layout):
        return Done(product(x, w, layout))
    decision, scaling = decide_sum(pattern, x, w, group, layout, plan, scaling)
    call = calls.InFlight(decision.program(x, w, None, True, scaling), x, w, None, scaling)
    decision.count()
    return call


start_gemm_rs = partial(_start, Pattern.GEMM_RS)
start_gemm_ar = partial(_start, Pattern.GEMM_AR)


def start_gather(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt"):
    """Gather x as `run_ag_gemm(x, w, ...)` does, in the background. The result's `complete` gives
    the rows [M, K], borrowed until its `close`.
    """
    x, w, _ = in_memory(Pattern.AG_GEMM, x, w, None, group)
    if agreed_empty(Pattern.AG_GEMM, x, w, group, layout):
        return Done(x)
    decision = decide(Pattern.AG_GEMM, x, w, None, group, layout, None)
    decision.report_fallback()
    build = registry.gather_builder(decision.plan)
    call = calls.start_gather(build, x, decision.plan, decision.workspace)
    decision.count()
    return call


def start_gather_and_gemm_rs(x: Tensor, dy: Tensor, w: Tensor, group: ProcessGroup):
    """The first half of a column layer's backward: the results of `start_gather(x, w)` and of
    `start_gemm_rs(dy, w, layout="nn")`, under one plan.

    The strategy of the GEMM+RS also gathers x [M / R, K].
    """
    dy, w, _ = in_memory(Pattern.GEMM_RS, dy, w, None, group)
    x = memory("x", x)
    if agreed_empty(Pattern.GEMM_RS, dy, w, group, "nn"):
        return Done(x), Done(product(dy, w, "nn"))
    decision = decide(Pattern.GEMM_RS, dy, w, None, group, "nn", None)
    decision.report_fallback()
    space = decision.workspace
    space.note(f"gather beside {decision.description}")
    gathers, gather_plan = registry.gather_beside(decision.plan)
    with space.guard():  # the gather is open if the scatter cannot begin
        gather = calls.start_gather(gathers, x, gather_plan, space)
        scatter = calls.InFlight(decision.program(dy, w, None, True, None), dy, w, None)
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
    space = entered(group, x.device)
    space.note(f"gather of {[*x.shape]} {x.dtype} beside other calls")
    return calls.start_gather(gather_beside, x, _BESIDE, space, scaling)
