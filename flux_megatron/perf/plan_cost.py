"""The predicted time of a plan, for a choice among plans: `operator_cost`'s, and where the tiles of
`hopper` are drawn one after another, theirs.
"""

from __future__ import annotations

from dataclasses import replace

from flux_megatron.perf import gather_tiles, scatter_tiles
from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.operator_cost import gemms_us, left_by_others, predict_us, shard_us
from flux_megatron.problem import Plan, Problem


def plan_us(problem: Problem, plan: Plan, hardware: Hardware, connections: str = "1") -> float:
    """As `predict_us`: the time in microseconds, for "nn" that of the layer's whole backward."""
    if plan.strategy == "hopper" and problem.spec.scatters:
        return _scattered_us(problem, plan, hardware)
    predicted = predict_us(problem, plan, hardware, connections=connections)
    if plan.strategy != "hopper" or not problem.spec.gathers or plan.split_k_shards:
        return predicted
    return predicted + _longer_us(problem, plan, hardware)


def _longer_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """By how much this plan's tiles of AG+GEMM take longer than the waves of `predict_us`."""
    reference = replace(plan, tile=gather_tiles.REFERENCE, comm_rows=0)
    return gather_tiles.tiles_us(problem, plan, hardware) - gather_tiles.tiles_us(
        problem, reference, hardware
    )


def _scattered_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """In a backward x is gathered first, over the same links, and wgrad comes behind."""
    left = left_by_others(problem, hardware)
    gathered = left.copy_latency_us + (problem.world_size - 1) * shard_us(problem, left)
    _, wgrad = gemms_us(problem, hardware)
    tiles = scatter_tiles.tiles_us(problem, plan, left, gathered if problem.is_backward else 0.0)
    return FITTED.call_overhead_us["hopper"] + tiles + wgrad
