"""Which plan to use where nothing was measured: the cost model's prediction for the problem itself,
corrected by what was measured of other problems.

A measured plan tells how many times its prediction it took. The correction of a plan is the
weighted mean, over all entries of the same kind of problem, of these ratios (of their logarithms);
near shapes weigh most. An entry that did not try the plan gives the worst ratio of its strategy
there. docs/tuning.md says how far the choice is from the fastest plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.operator_cost import is_one_gemm
from flux_megatron.problem import Plan, Problem
from flux_megatron.tuning.plan_cost import in_parts, plan_us
from flux_megatron.tuning.plan_entry import Entry

# Of a shard: below, latencies decide that the model does not know. Some plans win there, and most
# lose (4 x H200, 2026-11-21, torch 2.11, triton 3.6): that takes a measurement.
FEWEST_ROWS = 256
# There a plan whose entries all have more rows is taken if it promises to be so much faster than
# `sequential`. M = 512 and 256 chosen from all larger M, 52 problems (4 x H200, 2026-11-21): 3.6 %
# slower than the fastest on average, with no margin 7.7 %, by `sequential` 7.1 %.
MARGIN = 0.08
# Times M: entries with more rows than that tell nothing of it. 496 from 2048 was right, 80 from
# 2048 was not (2 x H200, 2026-11-22: GEMMs of N = 24 and K = 16 got plans that overlap).
FARTHEST = 5
FOR_FEW = "low_latency"  # the strategy that is made for such shards
# What it must promise against `sequential` where nothing near by was measured: its GEMM is up to
# 10 % slower than the library's where N is large, which the model does not know. 13 of 20 cases of
# M = 4 to 64 promise it, and it is faster in all of them; of the 7 others in 3 (2 x H200,
# 2026-11-24, few_rows_bench.jsonl).
FEW_MARGIN = 0.03
PARTS = "rows in parts of K"  # of `hopper`'s AG+GEMM
# Beside others AG+GEMM of few rows takes 1.89 times its prediction by NCCL and cuBLAS, whose
# kernels wait for SMs that others hold, 1.61 by one GEMM behind a gather, 1.44 by `hopper`, and
# 1.25 where its rows come in parts of K (means over 16 problems, M = 16 to 496, 2 x H100, 2 x H200,
# 2026-11-24 and 25, held_out.jsonl).
BESIDE = {"pipelined": 1.61 / 1.89, "hopper": 1.44 / 1.89, PARTS: 1.25 / 1.89}
# Alone GEMM+RS of few rows takes 1.08 times its prediction by NCCL and cuBLAS, and .94 by `hopper`
# where the SMs push and all tiles run at once; with a second wave it takes 1.11 (means over 15
# races of M = 256 to 496, 2 x H200, 2 x H100, 2026-11-24 and 25, held_out.jsonl).
ONE_WAVE = 0.94 / 1.08
ALIKE = 0.25  # what is nearer, as a factor of 1.4 in M is, weighs not much more


class Ratios(NamedTuple):
    """What an entry tells: the logarithm of measured over predicted time, by relative plan."""

    weight: float
    logs: Mapping[Plan, float]

    def of(self, relative: Plan) -> float | None:
        """The plan's, else the worst of its strategy, else None."""
        same = [log for plan, log in self.logs.items() if plan.strategy == relative.strategy]
        return self.logs.get(relative, max(same, default=None))


def best(
    problem: Problem, plans: Sequence[Plan], entries: Sequence[Entry], connections: str,
    facts: Hardware,
) -> Plan:  # fmt: skip
    """The plan with the least estimate, the first of equals; `plans` begin with `sequential`.

    For shards of few rows it is `low_latency` or `sequential`, unless others were measured near by
    and promise enough.
    """
    fewest = min((entry.problem.M for entry in entries), default=math.inf)
    few = problem.M_shard < FEWEST_ROWS
    if few and fewest > FARTHEST * problem.M:
        return _of_few(problem, plans, connections, facts)
    estimates = estimates_us(problem, plans, entries, connections, facts)
    if few and fewest > problem.M:
        estimates[plans[0]] *= 1 - MARGIN
    return min(plans, key=estimates.__getitem__)


def _of_few(problem: Problem, plans: Sequence[Plan], connections: str, facts: Hardware) -> Plan:
    """The best of the plans made for few rows if its prediction is less than that of `sequential`
    by the margin: `low_latency`, rows in parts of K, one GEMM behind a gather, and of `hopper`,
    where two ranks have raced it, AG+GEMM beside others and GEMM+RS alone. Beside others its
    GEMM+RS takes 1.86 times its prediction, NCCL and cuBLAS 1.79 times: at 128 x 14336 x 8192 it
    took 1.5 times as long.
    """
    plain, *others = plans
    words = [plan for plan in others if plan.strategy == FOR_FEW][:1]
    made = [
        plan for plan in others
        if is_one_gemm(problem, plan) or in_parts(problem, plan)
        or (plan.strategy == "hopper" and _raced(problem, plan, facts))
    ]  # fmt: skip
    promised = {
        plan: plan_us(problem, plan, facts, connections=connections) * _outlasts(problem, plan)
        for plan in (plain, *words, *made)
    }
    promised[plain] *= 1 - FEW_MARGIN
    return min(promised, key=promised.__getitem__)


def _raced(problem: Problem, plan: Plan, facts: Hardware) -> bool:
    """Whether two ranks have raced such plans of `hopper` for few rows."""
    if problem.world_size > 2 or problem.is_backward:
        return False
    if problem.beside:
        return problem.spec.gathers
    rows = problem.world_size * cdiv(problem.M_shard, plan.tile.block_m)
    at_once = rows * cdiv(problem.N_local, plan.tile.block_n) <= facts.sms
    by_sm = plan.transport == "sm" and not plan.split_k_shards
    return problem.spec.scatters and at_once and by_sm


def _outlasts(problem: Problem, plan: Plan) -> float:
    """How many times its prediction a plan for few rows takes, over what `sequential` does."""
    if problem.beside:
        return BESIDE.get(family(problem, plan), 1.0)
    return ONE_WAVE if plan.strategy == "hopper" and problem.spec.scatters else 1.0


def family(problem: Problem, plan: Plan) -> str:
    """Its strategy; rows in parts of K are a family of their own."""
    return PARTS if in_parts(problem, plan) else plan.strategy


def estimates_us(
    problem: Problem, plans: Sequence[Plan], entries: Sequence[Entry], connections: str,
    facts: Hardware,
) -> dict[Plan, float]:  # fmt: skip
    """The corrected prediction of each plan in microseconds; `entries` are of problems that differ
    in M, N, K and the software at most; `connections` is CUDA_DEVICE_MAX_CONNECTIONS or "unset".
    """
    known = [_ratios(entry, problem, connections, facts) for entry in entries]
    return {
        plan: plan_us(problem, plan, facts, connections=connections)
        * _correction(_relative(plan, problem), known)
        for plan in plans
    }


def _correction(relative: Plan, known: Sequence[Ratios]) -> float:
    found = [(ratios.weight, ratios.of(relative)) for ratios in known]
    pairs = [(weight, log) for weight, log in found if log is not None]
    total = sum(weight for weight, _ in pairs)
    return math.exp(sum(weight * log for weight, log in pairs) / total) if pairs else 1.0


def _ratios(entry: Entry, problem: Problem, connections: str, facts: Hardware) -> Ratios:
    other_setting = entry.environment.max_connections != connections
    weight = (ALIKE + _distance(entry.problem, problem) + other_setting) ** -3
    theirs = entry.environment.max_connections
    logs = {
        _relative(one.plan, entry.problem): math.log(
            one.median_us / plan_us(entry.problem, one.plan, facts, connections=theirs)
        )
        for one in entry.measured
    }
    return Ratios(weight, logs)


def _distance(one: Problem, other: Problem) -> float:
    """How different two shapes are: 1 for a factor of 2 in M, half of it for one in N or K.

    M decides how much time there is to hide a transfer in; another setting of
    CUDA_DEVICE_MAX_CONNECTIONS counts like a factor of 2 in M.
    """
    M, N, K = (
        math.log2(getattr(one, name) / getattr(other, name))
        for name in ("M", "N_local", "K_local")
    )  # fmt: skip
    return M**2 + N**2 / 2 + K**2 / 2


def _relative(plan: Plan, problem: Problem) -> Plan:
    """The plan with `comm_rows` as the number of communication tiles in a shard, and `group_rows`
    as that of the groups: what plans of different M have in common.
    """
    tiles = cdiv(problem.M_shard, plan.comm_rows) if plan.comm_rows else 1
    groups = (len(plan.group_rows),) if plan.group_rows else ()
    return replace(plan, comm_rows=tiles, group_rows=groups)
