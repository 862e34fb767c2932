"""The plain strategy: one collective and one library GEMM. It runs every problem, and is the
baseline of all other strategies.

Backward hides its collectives behind the other GEMM, as Megatron does: both start asynchronously.

    AG+GEMM           all-gather of x | GEMM
    GEMM+RS           GEMM | reduce-scatter
    row backward      all-gather of dy | dgrad | wgrad
    column backward   all-gather of x, beside it dgrad | reduce-scatter of dx, beside it wgrad
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from flux_megatron.overlap import collectives, library_gemm
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import is_fp8, result_dtype
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.steps import Slot

NEEDS_SYMMETRIC_MEMORY = False


def supports(problem: Problem) -> str | None:
    """None: this strategy can run every problem."""
    return None


def default_plan(problem: Problem) -> Plan:
    return Plan("sequential")


def why_not(problem: Problem, plan: Plan) -> str | None:
    """None: there is nothing to it."""
    return None


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: the default plan."""
    return [default_plan(problem)]


def _gather(p: CallProgram, x: Slot) -> Slot:
    """The rows of every rank, once `collectives.wait_for` has been added."""
    gathered = x.new_empty(p.world_size * len(x), x.shape[1])
    gather = collectives.all_gather_fp8 if is_fp8(x) else collectives.all_gather
    collectives.start(p, "all-gather", gather, gathered, x)
    return gathered


def _ag_gemm(p: CallProgram) -> Slot:
    gathered, scales = _gather(p, p.x), None
    collectives.wait_for(p)
    if p.scaling and p.scaling.blockwise:
        scales = _gather(p, p.scaling.x)
        collectives.wait_for(p)
    library_gemm.transpose(p)
    y = p.x.new_empty(len(gathered), p.N, dtype=result_dtype(p.x, p.scaling))
    library_gemm.multiply(p, gathered, out=y, bias=p.bias, x_scale=scales)
    if p.bias is not None and p.scaling is None:
        p.torch(Tensor.add_, y, p.bias)
    p.caller_step(gathered)
    return y


def gather_rows(p: CallProgram) -> None:
    """x of every rank for the caller, who enqueues while it is in flight, then borrows it."""
    gathered = _gather(p, p.x)
    p.caller_step()
    collectives.wait_for(p)
    p.caller_step(gathered)


def _product(p: CallProgram) -> Slot:
    library_gemm.transpose(p)
    partial = p.x.new_empty(len(p.x), p.N, dtype=result_dtype(p.x, p.scaling))
    library_gemm.multiply(p, p.x, out=partial)
    return partial


def _gemm_rs(p: CallProgram) -> Slot:
    partial = _product(p)
    y = partial.new_empty(len(p.x) // p.world_size, p.N)
    collectives.start(p, "reduce-scatter", collectives.reduce_scatter, y, partial)
    p.caller_step()
    collectives.wait_for(p)
    return y


def _gemm_ar(p: CallProgram) -> Slot:
    y = _product(p)
    collectives.start(p, "all-reduce", dist.all_reduce, y)
    p.caller_step()
    collectives.wait_for(p)
    return y


BUILDERS: dict[Pattern, Builder] = {COLUMN: _ag_gemm, ROW: _gemm_rs, Pattern.GEMM_AR: _gemm_ar}
