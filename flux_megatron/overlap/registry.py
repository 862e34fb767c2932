"""The table of strategies, and those that can run a problem. `tuning` chooses among these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from flux_megatron.overlap import (
    fused,
    hopper,
    low_latency,
    pipelined,
    sequential,
    signalled,
    transfer,
)
from flux_megatron.overlap.gather import gather_rows
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.places import Missing
from flux_megatron.symm.program import Builder


class Strategy(Protocol):
    """How patterns overlap: a module of this folder. `BUILDERS` make the programs of those
    patterns that it can compute.

    `supports` says why it cannot run a problem, or None, and `why_not` the same of a plan for one
    that it supports; `candidates` are plans worth measuring beside `default_plan`.
    """

    @property
    def NEEDS_SYMMETRIC_MEMORY(self) -> bool: ...

    @property
    def BUILDERS(self) -> Mapping[Pattern, Builder]: ...

    def supports(self, problem: Problem) -> str | None: ...

    def why_not(self, problem: Problem, plan: Plan) -> str | None: ...

    def default_plan(self, problem: Problem) -> Plan: ...

    def candidates(self, problem: Problem) -> list[Plan]: ...


# in order of preference without a measurement; the last can run every problem
_ALL: dict[str, Strategy] = {
    "low_latency": low_latency,
    "hopper": hopper,
    "fused": fused,
    "pipelined": pipelined,
    "signalled": signalled,
    "sequential": sequential,
}
STRATEGIES: Mapping[Pattern, Mapping[str, Strategy]] = {
    pattern: {name: one for name, one in _ALL.items() if pattern in one.BUILDERS}
    for pattern in Pattern
}


def strategy(problem: Problem, name: str) -> Strategy:
    return STRATEGIES[problem.pattern][name]


def refusal(
    problem: Problem, name: str, missing: Missing | None, plan: Plan | None = None
) -> str | None:
    """Why the strategy cannot run the problem by this plan, or by its default one, or None.
    `missing` is what the ranks' workspace says.
    """
    if name not in STRATEGIES[problem.pattern]:
        return f"{name} is not built for {problem.pattern}"
    one = strategy(problem, name)
    lacking = missing if one.NEEDS_SYMMETRIC_MEMORY else None
    reason = None if lacking is None or lacking.mailboxes else lacking.reason
    if reason := reason or one.supports(problem):
        return reason
    if plan is None and lacking is not None:
        return None if candidates(problem, name, missing) else lacking.reason
    plan = plan or one.default_plan(problem)
    if lacking is not None and not _by_copies(problem, plan):
        return lacking.reason
    return one.why_not(problem, plan)


def default_plan(problem: Problem, name: str, missing: Missing | None) -> Plan:
    """The plan of a strategy that can run the problem, without a measurement."""
    if missing is None or not (able := candidates(problem, name, missing)):
        return strategy(problem, name).default_plan(problem)
    return able[0]


def _by_copies(problem: Problem, plan: Plan) -> bool:
    """Whether copy engines alone reach other ranks, so that mailboxes will do."""
    if plan.strategy == "hopper":
        by_engine = plan.transport in ("copy_engine", "engines")
        return by_engine and transfer.unequal_shards(problem) is None
    return plan.strategy == "pipelined" or (plan.strategy == "fused" and problem.spec.gathers)


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why the plan is none for the problem, whoever supports it here, or None: asked of every plan
    that is read or adapted to other rows.
    """
    if plan.strategy not in STRATEGIES[problem.pattern]:
        return f"{plan.strategy} is not built for {problem.pattern}"
    return strategy(problem, plan.strategy).why_not(problem, plan)


def runnable(problem: Problem, wanted: str, missing: Missing | None) -> Iterator[str]:
    """The strategies that overlap and can run the problem, each asked when the caller comes to it:
    at a new M the host would make a plan of each. `wanted` is one strategy or "auto"; `missing`
    as in `refusal`.
    """
    for name in _asked(problem, wanted):
        if refusal(problem, name, missing) is None:
            yield name


def why_none(problem: Problem, wanted: str, missing: Missing | None) -> str | None:
    """Of a problem that none of them can run: the last one's reason, which needs least."""
    return refusal(problem, _asked(problem, wanted)[-1], missing)


def _asked(problem: Problem, wanted: str) -> list[str]:
    overlap = (name for name in STRATEGIES[problem.pattern] if name != "sequential")
    return [*overlap] if wanted == "auto" else [wanted]


def candidates(problem: Problem, name: str, missing: Missing | None = None) -> list[Plan]:
    """The plans of a strategy that can run and are worth measuring; its default plan, if it can, is
    the first.
    """
    module = strategy(problem, name)
    plans = dict.fromkeys([module.default_plan(problem), *module.candidates(problem)])
    able = [one for one in plans if missing is None or not refusal(problem, name, missing, one)]
    if missing is not None:
        # By mailboxes sums that travel early take .80 to .92 of the time of sums that travel at the
        # end, 1.01 and 1.04 where the link takes much longer than the GEMM (four and two shapes,
        # two ranks with half of an H200 each, 2026-12-01, h200/checks.jsonl). In backward wgrad
        # hides those at the end, and more ranks were not measured.
        last = problem.is_backward or problem.world_size > 2
        able.sort(key=lambda plan: (plan.transport == "engines") == last)
    return [plan for plan in able if module.why_not(problem, plan) is None]


def gather_builder(plan: Plan) -> Builder:
    """That of a gather of x for a caller who enqueues beside it, where his call has this plan."""
    pushes = _ALL[plan.strategy].NEEDS_SYMMETRIC_MEMORY
    return gather_rows if pushes else sequential.gather_rows


def gather_beside(plan: Plan) -> tuple[Builder, Plan]:
    """The same, and the gather's own plan, beside a GEMM+RS of this one: copy engines push, or a
    collective.
    """
    pushes = _ALL[plan.strategy].NEEDS_SYMMETRIC_MEMORY
    return gather_builder(plan), Plan("pipelined" if pushes else "sequential")
