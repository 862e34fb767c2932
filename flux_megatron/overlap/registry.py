"""The table of strategies, and which of them can run a problem. `tuner` chooses among those."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from flux_megatron.overlap import fused, hopper, pipelined, sequential
from flux_megatron.problem import Pattern, Plan, Problem

# in order of preference where nothing else is known; every pattern ends with one that is always
# possible
STRATEGIES: dict[Pattern, dict[str, ModuleType]] = {
    Pattern.AG_GEMM: {
        "hopper": hopper,
        "fused": fused,
        "pipelined": pipelined,
        "sequential": sequential,
    },
    Pattern.GEMM_RS: {
        "hopper": hopper,
        "fused": fused,
        "pipelined": pipelined,
        "sequential": sequential,
    },
}


def strategy(problem: Problem, name: str) -> ModuleType:
    return STRATEGIES[problem.pattern][name]


def overlapping(
    problem: Problem, wanted: str, unavailable: str | None
) -> tuple[list[str], str | None]:
    """The strategies that overlap and can run the problem, and why the last other one cannot:
    the earlier ones ask for more.

    `wanted` is one of them or "auto"; `unavailable` says why there is no symmetric memory between
    the ranks, or is None.
    """
    table = STRATEGIES[problem.pattern]
    names = [name for name in table if name != "sequential"] if wanted == "auto" else [wanted]
    reasons = {name: unavailable or table[name].supports(problem) for name in names}
    refused = [reason for reason in reasons.values() if reason is not None]
    return [name for name in names if reasons[name] is None], refused[-1] if refused else None


def candidates(problem: Problem, name: str) -> list[Plan]:
    """The plans of a strategy that are worth measuring; its default plan is the first."""
    module = strategy(problem, name)
    return [*dict.fromkeys([module.default_plan(problem), *module.candidates(problem)])]


def gather_plan(problem: Problem, plan: Plan) -> Plan:
    """The plan of the gather of x in a column layer's backward, beside the GEMM+RS `problem`: the
    default of the strategy of its plan.
    """
    gathering = replace(problem, pattern=Pattern.AG_GEMM, N=problem.K, K=problem.N, layout="nt")
    chosen: Plan = strategy(gathering, plan.strategy).default_plan(gathering)
    return chosen
