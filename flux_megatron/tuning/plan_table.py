"""The plans of a layer kind, by ranges of M: made once, agreed once, then looked up without a
question to anybody.

A kind is all of a problem but its M. Its points are plans that were measured at some M, or raced
for a range; the nearest point of its range gives a call its plan. A range without a point goes by
`ruled`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import registry, sequential, signalled
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.places import Missing

# The binary logarithm of the M that stands for a range, from 1/sqrt(2) to sqrt(2) of it; the first
# and the last have all that is below and above.
LOG2_FEWEST, LOG2_MANY, LOG2_MOST = 3, 10, 13
RANGES = range(LOG2_FEWEST, LOG2_MOST + 1)
RULED_ROWS = 64  # up to which `low_latency` is chosen unmeasured
# Of each strategy. Of two, the fastest plan of GEMM+RS was 1.0 % behind the best of all on average
# and 9.4 % at most, of four .3 % and 7.4 % (87 entries of configs/tuned with M >= 1024); of AG+GEMM
# `hopper` has two there. One takes .04 s.
FIRST_PLANS = 4


def range_of(M: int) -> int:
    return min(LOG2_MOST, max(LOG2_FEWEST, round(math.log2(M))))


def together(M: int) -> range:
    """The ranges that calls of M rows make likely: all of training, or of few rows their own."""
    number = range_of(M)
    return range(LOG2_MANY, LOG2_MOST + 1) if number >= LOG2_MANY else range(number, number + 1)


def raced_as(problem: Problem, number: int) -> Problem:
    """What stands for a range in the race that the problem waits for: the problem itself in its
    own, for most runs have one M; whole shards, and no more rows than the last range's.
    """
    here = number == range_of(problem.M)
    M = min(problem.M, 1 << LOG2_MOST) if here else 1 << number
    return replace(problem, M=cdiv(M, problem.world_size) * problem.world_size)


@dataclass
class PlanTable:
    """`points` are plans by their M. `settled` are ranges that need no race any more. `apart`: each
    range is raced when it is met.
    """

    points: dict[int, Plan] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    apart: bool = False

    def plan(self, problem: Problem, names: Iterable[str], missing: Missing | None = None) -> Plan:
        """Of the strategies `names`, which can run the problem, or `sequential`."""
        if plan := self.measured(problem):
            names = [*names]
            refused = missing and registry.refusal(problem, plan.strategy, missing, plan)
            if plan.strategy in (*names, "sequential") and not refused:
                return plan
        return ruled(problem, names, missing)

    def measured(self, problem: Problem) -> Plan | None:
        """That of the nearest point in the range, or None."""
        here = [M for M in self.points if range_of(M) == range_of(problem.M)]
        if not here:
            return None
        nearest = min(here, key=lambda M: (abs(math.log(M / problem.M)), M))
        return for_rows(self.points[nearest], nearest, problem)

    def ranges(self, M: int) -> range:
        """What is compiled and raced at a call of M rows."""
        number = range_of(M)
        return range(number, number + 1) if self.apart else together(M)

    def unsettled(self, problem: Problem) -> list[int]:
        """The ranges to race at this call: its own first, and in training all that training has, so
        that no later call waits for a race.

        A kind that has met training's ranges races no fewer rows, but for GEMM+AR, which decodes:
        for few rows races compile new kernels, and a step whose last micro-batch had 46 tokens took
        23 s in place of 3 (NeMo-RL, 2 x H200, 2026-11-30, h200x2/frameworks.jsonl).
        """
        done, own = self.settled | {range_of(one) for one in self.points}, range_of(problem.M)
        trained = problem.spec.divided and any(number >= LOG2_MANY for number in done)
        if own in done or (own < LOG2_MANY and trained):
            return []
        return [own, *(number for number in self.ranges(problem.M) if number not in {*done, own})]


def for_rows(plan: Plan, M: int, problem: Problem) -> Plan:
    """The plan of M rows as one of the problem's rows: with as many communication tiles, and wave
    groups of the same shares. The strategy's own plan in place of one that these rows do not allow.
    """
    if M != problem.M and plan.comm_rows:
        comm_tiles = max(1, cdiv(M // problem.world_size, plan.comm_rows))
        plan = replace(plan, comm_rows=cdiv(problem.M_shard, comm_tiles))
    if M != problem.M and plan.group_rows:
        plan = signalled.for_rows(plan, problem, M)
    if registry.why_not(problem, plan):
        return registry.default_plan(problem, plan.strategy, None)
    return plan


def ruled(problem: Problem, names: Iterable[str], missing: Missing | None = None) -> Plan:
    """The plan without a measurement, of the strategies `names` in order of preference.

    `sequential` below M = 1024 was 7.1 % slower than the fastest plan on average, `hopper` from
    there on 1.7 % (202 entries of configs/tuned: 4 and 2 x H200, 2 x H100).

    With blockwise scales the library multiplies a shard at a time. On two ranks, M = 4096, two such
    GEMMs take 14 to 28 us more than one, of 66 to 143 us that NCCL takes (2 x H100,
    h100x2/fp8_blockwise.jsonl); a copy engine needs less time than one of them.
    """
    on_cpu = problem.device == "cpu"
    few = problem.M <= RULED_ROWS and not problem.spec.divided
    many = on_cpu or (problem.M_shard if problem.blockwise else problem.M) >= 1 << LOG2_MANY
    for name in names if few or many else ():
        if few if name == "low_latency" else many:
            return registry.default_plan(problem, name, missing)
    return sequential.default_plan(problem)


def racers(problem: Problem, names: Sequence[str], missing: Missing | None = None) -> list[Plan]:
    """What a race at start tries, after `sequential`: the first plans of each strategy. In no race
    of 296 was `fused` the fastest where `hopper` could run, or `signalled` where kernels reach
    other ranks. With mailboxes `pipelined` is not either, in any of 16 (h200x2/machines.jsonl).
    """
    slower = {"fused"} if missing is None else {"fused", "pipelined"}
    raced = [name for name in names if name not in slower or "hopper" not in names]
    if missing is None:
        raced = [name for name in raced if name != "signalled"] or raced
    able = (registry.candidates(problem, name, missing)[:FIRST_PLANS] for name in raced)
    found = [plan for plans in able for plan in plans]
    if missing is None:
        found = [
            plan for plan in found if plan.transport != "engines"
        ]  # measured by mailboxes alone
    return [sequential.default_plan(problem), *found]
