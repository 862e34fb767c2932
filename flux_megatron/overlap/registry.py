"""The table of strategies, and those that can run a problem. `tuning` chooses among these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from flux_megatron.overlap import fused, hopper, low_latency, pipelined, sequential, signalled
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import Scaling
from flux_megatron.symm.program import Builder
from flux_megatron.symm.space import Workspace

# x, w, layout, plan, workspace -> y, without bias
Forward = Callable[[Tensor, Tensor, str, Plan, Workspace], Tensor]


class GatherInFlight(Protocol):
    """A gather that has begun: `complete` gives all rows, valid until `close`."""

    def complete(self) -> Tensor: ...

    def close(self) -> None: ...


class ReductionInFlight(Protocol):
    """A sum over the ranks that has begun: `finish` gives it, or this rank's rows of it."""

    def finish(self) -> Tensor: ...


class Strategy(Protocol):
    """How patterns overlap: a module of this folder. `PATTERNS` are those that it can compute.

    `supports` says why it cannot run a problem, or None, and `why_not` the same of a plan for one
    that it supports; `candidates` are plans worth measuring beside `default_plan`. Those that
    support FP8 take a `scaling` in their other functions too.
    """

    @property
    def NEEDS_SYMMETRIC_MEMORY(self) -> bool: ...

    @property
    def PATTERNS(self) -> tuple[Pattern, ...]: ...

    def supports(self, problem: Problem) -> str | None: ...

    def why_not(self, problem: Problem, plan: Plan) -> str | None: ...

    def default_plan(self, problem: Problem) -> Plan: ...

    def candidates(self, problem: Problem) -> list[Plan]: ...

    def start_gather(self, x: Tensor, plan: Plan, workspace: Workspace) -> GatherInFlight: ...

    def ag_gemm(
        self, x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan,
        workspace: Workspace, consume: Callable[[Tensor], None] | None,
        scaling: Scaling | None = None,
    ) -> Tensor: ...  # fmt: skip

    def gemm_rs(
        self, x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
    ) -> Tensor: ...

    def start_gemm_rs(
        self, x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
    ) -> ReductionInFlight: ...

    def gemm_ar(
        self, x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
    ) -> Tensor: ...

    def start_gemm_ar(
        self, x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
    ) -> ReductionInFlight: ...


# in order of preference without a measurement; the last can run every problem
_ALL: dict[str, Strategy] = {
    "low_latency": low_latency,
    "hopper": hopper,
    "fused": fused,
    "pipelined": pipelined,
    "signalled": signalled,
    "sequential": sequential,
}
# whose calls are programs (`overlap.calls`), which break a group off themselves
BY_PROGRAM: tuple[Strategy, ...] = (low_latency, hopper, fused, pipelined)
BUILDERS: Mapping[str, Mapping[Pattern, Builder]] = {
    "low_latency": low_latency.BUILDERS,
    "hopper": hopper.BUILDERS,
    "fused": fused.BUILDERS,
    "pipelined": pipelined.BUILDERS,
}
STRATEGIES: Mapping[Pattern, Mapping[str, Strategy]] = {
    pattern: {name: one for name, one in _ALL.items() if pattern in one.PATTERNS}
    for pattern in Pattern
}


def strategy(problem: Problem, name: str) -> Strategy:
    return STRATEGIES[problem.pattern][name]


def refusal(
    problem: Problem, name: str, unavailable: str | None, plan: Plan | None = None
) -> str | None:
    """Why the strategy cannot run the problem by this plan, or by its default one, or None.
    `unavailable` says why there is no symmetric memory between the ranks, or is None.
    """
    if name not in STRATEGIES[problem.pattern]:
        return f"{name} is not built for {problem.pattern}"
    one = strategy(problem, name)
    reason = (unavailable if one.NEEDS_SYMMETRIC_MEMORY else None) or one.supports(problem)
    return reason or one.why_not(problem, plan or one.default_plan(problem))


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why the plan is none for the problem, whoever supports it here, or None: asked of every plan
    that is read or adapted to other rows.
    """
    if plan.strategy not in STRATEGIES[problem.pattern]:
        return f"{plan.strategy} is not built for {problem.pattern}"
    return strategy(problem, plan.strategy).why_not(problem, plan)


def overlapping(
    problem: Problem, wanted: str, unavailable: str | None
) -> tuple[list[str], str | None]:
    """The strategies that overlap and can run the problem, and the reason of the last one that
    cannot, which needs least. `wanted` is one strategy or "auto"; `unavailable` as in `refusal`.
    """
    table = STRATEGIES[problem.pattern]
    names = [name for name in table if name != "sequential"] if wanted == "auto" else [wanted]
    reasons = {name: refusal(problem, name, unavailable) for name in names}
    refused = [reason for reason in reasons.values() if reason is not None]
    return [name for name in names if reasons[name] is None], refused[-1] if refused else None


def candidates(problem: Problem, name: str) -> list[Plan]:
    """The plans of a strategy that are worth measuring; its default plan is the first."""
    module = strategy(problem, name)
    plans = dict.fromkeys([module.default_plan(problem), *module.candidates(problem)])
    return [plan for plan in plans if module.why_not(problem, plan) is None]


def gather_plan(problem: Problem, plan: Plan) -> Plan:
    """The plan of the gather of x beside the GEMM+RS `problem` in a column layer's backward: the
    default plan of the same strategy, or `sequential` if that gathers nothing.
    """
    gathering = STRATEGIES[problem.dual.pattern].get(plan.strategy, sequential)
    return gathering.default_plan(problem.dual)


def forward(strategy: Strategy, pattern: Pattern) -> Forward:
    """Any pattern of a strategy as one call."""
    if pattern is COLUMN:
        return lambda x, w, layout, plan, space: strategy.ag_gemm(
            x, w, None, layout, plan, space, None
        )
    return strategy.gemm_rs if pattern is ROW else strategy.gemm_ar
