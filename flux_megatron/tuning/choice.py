"""Which plan a call gets: that of its layer kind's table, for its M.

The table is made at the first call of a kind. The leader of the group, rank 0, looks its measured
plans up, and one question through the store brings them to all. Then the ranges of M that have none
are raced, where a race may run: not in a CUDA graph's capture.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron import settings
from flux_megatron.overlap import registry, sequential
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.device import capturing
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import ahead, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.plan_table import RANGES, PlanTable, raced_as, racers

ROUNDS = 5  # of a race
# A model has 8 layer kinds: 4 layers, forward and backward. If all of them cannot race all their
# ranges of M in `tune_seconds`, each races only that of its first call: over sockets six races of
# two kinds took all the time, and seven kinds had none at their M (2 x H200, 2026-11-29).
KINDS = 8

# Between two plans. The winners of 64 races were .03 % behind the best plan with 2 ms and .3 %
# without (one 17 %, the others .02 %), and a race took .27 and .18 s; a run waits for 32 of them (2
# x H200, torch 2.11, 2026-11-28, h200x2/race_gap.jsonl).
GAP_S = 0.0

# In races, in this process. A plan's first run is not counted: it loads kernels, once a process.
_spent_s = 0.0


def agreed_table(problem: Problem, plan: Plan | None, space: Workspace) -> PlanTable:
    """The table of the problem's kind, for calls with the given plan or without one.

    Collective at the first call of a kind: `ProblemMismatch`, on every rank, if the ranks' problems
    or plans differ. It has the leader's points: what was measured here or, where nothing will be,
    on such a machine with other software.
    """
    kind = replace(problem, M=0)
    key = (kind, plan, settings.get())
    if key in space.agreed:
        return space.agreed[key]
    answer: dict[str, Any] = {"races": False, "apart": False, "points": []}
    if space.group.rank() == 0 and plan is None and settings.get().strategy == "auto":
        races = answer["races"] = _may_race(space)
        cache = plan_cache.opened(settings.get().cache, space.device)
        entries = cache.of_kind(kind, here=races)
        answer["apart"] = settings.get().tune == "met"
        answer["points"] = [(entry.problem.M, entry.plan.dumps()) for entry in entries]
    way = f"with {plan.dumps()}" if plan else f"by {_wanted(problem, space)}"
    question = f"{problem} {way}"
    said = json.loads(space.agreement.ask(question, json.dumps(answer))[0])
    points = {M: Plan.loads(text) for M, text in reversed(said["points"])}
    table = PlanTable(points, apart=said["apart"])
    if not said["races"]:
        table.settled |= {*RANGES}
    space.agreed[key] = table
    if said["races"] and problem.device == "cuda" and problem.world_size > 1:
        ahead.compile_kinds(problem, table.ranges(problem.M), table, space)
    return table


def _wanted(problem: Problem, space: Workspace) -> str:
    """What this rank's choice will depend on beside the table, for the ranks to compare."""
    given = settings.get()
    wanted = given.strategy + ", strictly" * given.strict
    if space.log is None:  # nothing will compare what they choose
        names = [*registry.runnable(problem, given.strategy, space.missing)]
        wanted += f" (can run: {', '.join(names) or 'none'})"
    return wanted


def choose(problem: Problem, table: PlanTable, space: Workspace) -> tuple[Plan, str | None]:
    """A plan, and why it does not overlap although it was meant to (None otherwise).

    The same on all ranks of the workspace's group. Collective where a range of M is to be raced.
    """
    wanted = settings.get().strategy
    if wanted == "sequential" or problem.world_size == 1:
        return sequential.default_plan(problem), None
    if wanted == "auto" and (plan := _measured_plan(problem, table, space)):
        return plan, None
    names = registry.runnable(problem, wanted, space.missing)
    if (first := next(names, None)) is None:
        reason = registry.why_none(problem, wanted, space.missing)
        return sequential.default_plan(problem), reason
    if wanted != "auto":
        return registry.default_plan(problem, wanted, space.missing), None
    if _is_raced(problem) and (ranges := table.unsettled(problem)):
        _race(problem, ranges, table, space)
    return table.plan(problem, chain((first,), names), space.missing), None


def _measured_plan(problem: Problem, table: PlanTable, space: Workspace) -> Plan | None:
    """That of the table, if it overlaps and can run the problem: no other strategy is asked. A
    measured `sequential` is None here: where nothing else can run it is a fallback, with a reason.
    """
    plan = table.measured(problem)
    if plan is None or plan.strategy == "sequential":
        return None
    return None if registry.refusal(problem, plan.strategy, space.missing, plan) else plan


def _is_raced(problem: Problem) -> bool:
    """Blockwise scales and sums in e4m3 are not: one strategy alone has them."""
    return not (problem.blockwise or problem.wire)


def _may_race(space: Workspace) -> bool:
    tune = settings.get().tune
    return tune == "on" or (tune != "off" and space.device.type == "cuda")


def _race(problem: Problem, ranges: list[int], table: PlanTable, space: Workspace) -> None:
    """Race the ranges of M, as far as there is time; none in a capture."""
    problems = [raced_as(problem, number) for number in ranges]
    answer = {"capturing": capturing(space.device), "seconds": _left_s()}
    question = f"race {problem} at M={', '.join(str(one.M) for one in problems)}"
    said = [json.loads(text) for text in space.agreement.ask(question, json.dumps(answer))]
    if any(theirs["capturing"] for theirs in said):
        return
    table.settled |= {*ranges}
    plans_of: dict[Problem, list[Plan]] = {}
    for one in problems if said[0]["seconds"] > 0 else []:
        names = [*registry.runnable(one, "auto", space.missing)]
        plans_of |= {one: racers(one, names, space.missing)} if names else {}
    with lasting():  # what is compiled and measured belongs to no caller
        if space.device.type == "cuda":
            ahead.compile_kinds(problem, ranges, table, space)
        fit = True
        for one, plans in plans_of.items():
            before_s = _spent_s
            if not tuner.leaders(space.group, fit and _left_s() > 0):
                break
            if entry := _measured(one, plans, space):
                table.points[one.M] = entry.plan
            races = min(len(plans_of), sum(each.M for each in plans_of) / one.M)  # as long as this
            all_kinds_s = KINDS * races * (_spent_s - before_s)
            fit = all_kinds_s <= settings.get().tune_seconds
    if space.device.type == "cuda":  # no symmetric memory comes from what trials have left there
        torch.cuda.empty_cache()


def _left_s() -> float:
    return settings.get().tune_seconds - _spent_s


def _measured(problem: Problem, plans: list[Plan], space: Workspace) -> Entry | None:
    global _spent_s
    started = timed = time.monotonic()

    def all_ran() -> None:
        nonlocal timed
        timed = time.monotonic()

    given = problem, plans, space.group, space.device
    try:
        entry = tuner.measure(*given, rounds=ROUNDS, all_ran=all_ran, gap_s=GAP_S)
    except tuner.NotMeasured as error:
        if dist.get_rank() == 0:
            said = f"{problem} is not raced, the rule chooses its plan: {error}"
            print(f"flux_megatron: {said}", file=sys.stderr)
        return None
    finally:
        _spent_s += time.monotonic() - timed
    if space.group.rank() == 0:
        plan_cache.keep(entry, settings.get().cache, space.device)
    if dist.get_rank() == 0:
        print(f"flux_megatron: {_described(entry, time.monotonic() - started)}", file=sys.stderr)
    return entry


def _described(entry: Entry, seconds: float) -> str:
    medians = {one.plan: one.median_us for one in entry.measured}
    plain = medians[Plan("sequential")]
    return (
        f"measured {entry.problem}: {entry.plan.strategy} {medians[entry.plan]:.0f} us, "
        f"sequential {plain:.0f} us ({len(medians)} plans in {seconds:.1f} s)"
    )
