"""The operations in two steps, for the schedules of backward: the caller may enqueue other work
between the start of a call and its `finish`, which gives the result.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.dispatch import decide, undecided, without_rows
from flux_megatron.ops import in_memory, reduced
from flux_megatron.overlap import calls
from flux_megatron.overlap.operands import memory, product
from flux_megatron.overlap.sequential import UnderWay
from flux_megatron.problem import Pattern
from flux_megatron.scaling import Scaling

start_gemm_rs = partial(reduced, Pattern.GEMM_RS, "start_gemm_rs", UnderWay)
start_gemm_ar = partial(reduced, Pattern.GEMM_AR, "start_gemm_ar", UnderWay)


def start_gather(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt"):
    """Gather x as `run_ag_gemm(x, w, ...)` does, in the background. The result's `complete` gives
    the rows [M, K], borrowed until its `close`.
    """
    x, w = in_memory(Pattern.AG_GEMM, x, w, group)
    if without_rows(Pattern.AG_GEMM, x, w, group, layout):
        return UnderWay(x)
    decision = decide(Pattern.AG_GEMM, x, w, None, group, layout, None)
    with decision.guard():
        return decision.strategy.start_gather(x, decision.plan, decision.workspace)


def start_gather_and_gemm_rs(x: Tensor, dy: Tensor, w: Tensor, group: ProcessGroup):
    """The first half of a column layer's backward: the results of `start_gather(x, w)` and of
    `start_gemm_rs(dy, w, layout="nn")`, under one plan.

    The strategy of the GEMM+RS also gathers x [M / R, K].
    """
    dy, w = in_memory(Pattern.GEMM_RS, dy, w, group)
    x = memory("x", x)
    if without_rows(Pattern.GEMM_RS, dy, w, group, "nn"):
        return UnderWay(x), UnderWay(product(dy, w, "nn"))
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
