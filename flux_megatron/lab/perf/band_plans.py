"""What predicts the bands of a `signalled` plan of AG+GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flux_megatron.lab.perf.constants import FITTED, Constants
from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.wave_groups import (
    CTA_GBPS,
    Curve,
    finish_us,
    nccl_curve,
)
from flux_megatron.launch.workload import ELEMENT_BYTES
from flux_megatron.problem import Plan, Problem


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
