"""The table of strategies, and which one a problem gets.

The choice is simple here: the strategy asked for, else the first in the table that supports the
problem.
"""

from __future__ import annotations

from types import ModuleType

from flux_megatron import settings
from flux_megatron.overlap import fused, pipelined, sequential
from flux_megatron.problem import Pattern, Plan, Problem

# in order of preference; every pattern ends with one that is always possible
STRATEGIES: dict[Pattern, dict[str, ModuleType]] = {
    Pattern.AG_GEMM: {"fused": fused, "pipelined": pipelined, "sequential": sequential},
    Pattern.GEMM_RS: {"fused": fused, "pipelined": pipelined, "sequential": sequential},
}


def strategy(problem: Problem, name: str) -> ModuleType:
    return STRATEGIES[problem.pattern][name]


def choose(problem: Problem, unavailable: str | None) -> tuple[Plan, str | None]:
    """A plan, and why it does not overlap although it was meant to (None otherwise).

    `unavailable` says why there is no symmetric memory between the ranks, or is None.
    """
    table = STRATEGIES[problem.pattern]
    wanted = settings.get().strategy
    if wanted == "sequential" or problem.world_size == 1:
        return sequential.default_plan(problem), None
    reasons = []
    for name in [n for n in table if n != "sequential"] if wanted == "auto" else [wanted]:
        reason = unavailable or table[name].supports(problem)
        if reason is None:
            return table[name].default_plan(problem), None
        reasons.append(reason)
    return sequential.default_plan(problem), reasons[0]
