"""The predicted time of a plan, for a choice among plans: `operator_cost`'s, or where `hopper`'s
tiles are drawn one after another, theirs.
"""

from __future__ import annotations

from dataclasses import replace

from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.operator_cost import gemms_us, left_by_others, predict_us, shard_us
from flux_megatron.problem import Plan, Problem
from flux_megatron.tuning import gather_tiles, scatter_tiles

# Beside an all-reduce a copy engine has this share of its rate, stores of the SMs all of it: so the
# chosen GEMM+RS is 2.5 % behind the fastest on average and 10 % at most in 11 races of M = 1536 to
# 16384, and 8.1 % and 29 % behind it if copies kept their rate (2 x H200, 2 x H100, 2026-11-24 and
# 25, held_out.jsonl).
COPY_SHARE_BESIDE = 0.5


def plan_us(problem: Problem, plan: Plan, hardware: Hardware, connections: str = "1") -> float:
    """As `predict_us`: the time in microseconds, for "nn" that of the layer's whole backward."""
    drawn = problem.spec.gathers or problem.spec.scatters
    if plan.strategy != "hopper" or not drawn:
        return predict_us(problem, plan, hardware, connections=connections)
    left = left_by_others(problem, hardware)
    tiles = _gathered_us if problem.spec.gathers else _scattered_us
    _, wgrad = gemms_us(problem, hardware)
    return FITTED.call_overhead_us["hopper"] + tiles(problem, plan, left) + wgrad


def in_parts(problem: Problem, plan: Plan) -> bool:
    """Whether rows come to `hopper`'s AG+GEMM in parts of K."""
    return plan.strategy == "hopper" and plan.splits > 1 and problem.spec.gathers


def _gathered_us(problem: Problem, plan: Plan, left: Hardware) -> float:
    return gather_tiles.tiles_us(problem, plan, left)


def _scattered_us(problem: Problem, plan: Plan, left: Hardware) -> float:
    """In a backward x is gathered first, over the same links."""
    if problem.beside and plan.transport == "copy_engine":
        left = replace(left, copy_gbps=COPY_SHARE_BESIDE * left.copy_gbps)
    gathered = left.copy_latency_us + (problem.world_size - 1) * shard_us(problem, left)
    return scatter_tiles.tiles_us(problem, plan, left, gathered if problem.is_backward else 0.0)
