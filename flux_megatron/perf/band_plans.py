"""The bands of a `signalled` plan: which model predicts them, and which are best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flux_megatron.perf.constants import FITTED, Constants
from flux_megatron.perf.gemm import ELEMENT_BYTES, gemm_us, pass_us
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.wave_groups import (
    COMM_SMS,
    CTA_GBPS,
    BandModel,
    Curve,
    best,
    ends_of,
    finish_us,
    model_of,
    nccl_curve,
)
from flux_megatron.problem import Plan, Problem

CurveOf = Callable[[int], "Curve | None"]


@dataclass(frozen=True)
class GatherModel:
    """AG+GEMM: `local_us` on the local shard, then `gemm_of(rows)` on the remote rows of each band
    of so many rows of a shard, when they have come. A band of n rows is n x `row_bytes` in all.

    For bands of one number the last is gathered at one time if the curve is a line: then the
    earliest prefix is the best.
    """

    rows: int
    local_us: float
    gemm_of: Callable[[int], float]
    row_bytes: int
    curve: Curve

    @property
    def begin(self) -> tuple[float, float]:
        return self.local_us, 0.0

    def after(self, first: int, last: int, before: Any) -> tuple[float, float]:
        """When rows `first` to `last` are multiplied, and when they have come."""
        computed, sent = before
        sent += self.curve.us((last - first) * self.row_bytes)
        return max(computed, sent) + self.gemm_of(last - first), sent

    def finish_us(self, group_rows: Any) -> float:
        return finish_us(self, group_rows)


def gather_model(
    problem: Problem, plan: Plan, hardware: Hardware, constants: Constants = FITTED,
    curve: Curve | None = None,
) -> GatherModel:  # fmt: skip
    """The model of AG+GEMM with `comm_sms` SMs, which the GEMMs lack all the time."""
    share = 1 - plan.comm_sms / hardware.sms
    rates = {dtype: rate * share for dtype, rate in hardware.tflops.items()}
    left = replace(hardware, sms=hardware.sms - plan.comm_sms, tflops=rates)
    element = ELEMENT_BYTES[problem.dtype]
    others, rows, K = problem.world_size - 1, problem.M_shard, problem.K_local
    row_bytes = problem.world_size * K * element
    # wgrad gets rows in order: those of each band are copied
    copied = 2 * row_bytes if problem.is_backward else 0

    def gemm_of(rows: int) -> float:
        gemm = gemm_us(left, others * rows, problem.N_local, K, problem.dtype, constants)
        return gemm + (pass_us(hardware, rows * copied) if copied else 0.0)

    gbps = hardware.nccl_gbps
    if plan.comm_sms:
        gbps = min(gbps, plan.comm_sms * CTA_GBPS[1])
    local_us = gemm_us(left, rows, problem.N_local, K, problem.dtype, constants)
    curve = curve or nccl_curve(problem, hardware, gbps)
    return GatherModel(rows, local_us, gemm_of, row_bytes, curve)


def band_model(
    problem: Problem, plan: Plan, hardware: Hardware, constants: Constants = FITTED,
    curve: Curve | None = None,
) -> BandModel:  # fmt: skip
    """What predicts the plan's bands. `curve` as in `wave_groups.model_of`."""
    model = gather_model if problem.spec.gathers else model_of
    return model(problem, plan, hardware, constants, curve)


def best_plans(
    problem: Problem, like: Plan, hardware: Hardware, curve_of: CurveOf = lambda comm_sms: None
) -> list[Plan]:
    """The plan with the best bands for each number of SMs left to collectives, the fastest first;
    else as `like`. `curve_of` gives measured curves, by these SMs.
    """
    plans = {}
    for comm_sms in COMM_SMS:
        plan = replace(like, comm_sms=comm_sms)
        model = band_model(problem, plan, hardware, curve=curve_of(comm_sms))
        plan = replace(plan, group_rows=best(model, ends_of(model.rows, plan.tile.block_m)))
        plans[plan] = model.finish_us(plan.group_rows)
    return sorted(plans, key=plans.__getitem__)
