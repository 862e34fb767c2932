"""A tensor-parallel linear layer's forward and backward, by the strategy that runs it.

| strategy | forward | backward of a column layer | of a row layer |
| --- | --- | --- | --- |
| serial | NCCL and GEMM, one after the other | the same | the same |
| megatron | as serial | x gathered under dgrad, dx scattered under wgrad | as serial |
| hopper, fused, pipelined | ours, see `operator_cost` | the same | the same |
| auto | the fastest of ours and megatron | the same | the same |
| te, async_tp | a library GEMM per shard | a collective beside each GEMM | as forward |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flux_megatron.lab.perf.all_reduce import all_reduce_us, exposed_share
from flux_megatron.lab.perf.constants import FITTED, Constants
from flux_megatron.lab.perf.gemm import gemm_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.operator_cost import (
    beside_us,
    collective_us,
    gemms_us,
    moved_bytes,
    predict_us,
    shard_us,
)
from flux_megatron.launch.workload import Arm
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem

OURS = ("hopper", "fused", "pipelined")
STRATEGY: dict[Arm, str] = {"megatron": "megatron", "te": "te", "flux": "auto"}


@dataclass(frozen=True)
class Linear:
    """y[M, N] = x[M, K] @ w; the ranks share N in a column layer, K in a row layer."""

    column: bool
    M: int
    N: int
    K: int
    tp: int
    dtype: str = "bfloat16"
    sequence_parallel: bool = True

    @property
    def forward(self) -> Problem:
        pattern = COLUMN if self.column else ROW
        return Problem(pattern, self.M, self.N, self.K, self.dtype, self.tp)

    @property
    def backward(self) -> Problem:
        return self.forward.dual


class Cost(NamedTuple):
    """Whole times, and the exposed communication in them."""

    forward_us: float
    backward_us: float
    forward_exposed_us: float
    backward_exposed_us: float


@dataclass(frozen=True)
class Platform:
    """The machine of a prediction. `connections` is CUDA_DEVICE_MAX_CONNECTIONS."""

    hardware: Hardware
    connections: str = "1"
    constants: Constants = FITTED


def cost(layer: Linear, strategy: str, platform: Platform) -> Cost:
    """The cost of a layer. Without sequence parallelism a row layer's forward all-reduces y, and a
    column layer's backward dx, beside wgrad.
    """
    problems = layer.forward, layer.backward
    gemms = [gemms_us(one, platform.hardware, platform.constants) for one in problems]
    forward, backward = (sum(one) for one in gemms)
    if layer.tp == 1:
        return Cost(forward, backward, 0.0, 0.0)
    if layer.sequence_parallel:
        first = max(0.0, operator_us(problems[0], strategy, platform) - forward)
        second = max(0.0, operator_us(problems[1], strategy, platform) - backward)
    else:
        reduced = replace(problems[layer.column], pattern=Pattern.GEMM_AR)
        exposed = _all_reduced_us(reduced, strategy, platform) - sum(gemms[layer.column])
        first, second = (0.0, exposed) if layer.column else (exposed, 0.0)
    return Cost(forward + first, backward + second, first, second)


def _all_reduced_us(problem: Problem, strategy: str, platform: Platform) -> float:
    """GEMM+AR; for layout "nn" with wgrad. Only our strategies have another one than Megatron."""
    if strategy == "auto":
        return min(_all_reduced_us(problem, one, platform) for one in _fastest(platform))
    if strategy in OURS:
        return predict_us(problem, Plan(strategy), platform.hardware, platform.constants)
    gemms = gemms_us(problem, platform.hardware, platform.constants)
    all_reduce = all_reduce_us(platform.hardware, moved_bytes(problem), problem.world_size)
    if problem.is_backward:
        all_reduce = beside_us(all_reduce, gemms[1:], exposed_share(platform.connections))
    return sum(gemms) + all_reduce


def _fastest(platform: Platform) -> tuple[str, ...]:
    """What "auto" takes the best of: the kernel for sm_90 on Hopper GPUs, the portable one
    elsewhere.
    """
    return ("hopper" if platform.hardware.hopper else "fused", "pipelined", "megatron")


def operator_us(problem: Problem, strategy: str, platform: Platform) -> float:
    """AG+GEMM or GEMM+RS; for layout "nn" the whole backward of its layer."""
    if strategy == "auto":
        return min(operator_us(problem, one, platform) for one in _fastest(platform))
    if strategy in OURS:
        return predict_us(problem, Plan(strategy), platform.hardware, platform.constants)
    gemms = gemms_us(problem, platform.hardware, platform.constants)
    collective = _collective_us(problem, platform)
    gathers = problem.spec.gathers
    if problem.layout == "nn" and not gathers:  # two collectives, each beside a GEMM
        return sum(gemms) + beside_us(collective, gemms, _backward_share(strategy, platform))
    if strategy in ("serial", "megatron"):
        return sum(gemms) + collective
    exposure = platform.constants.exposures[strategy, platform.connections]
    exposed = collective * (exposure.gather if gathers else exposure.scatter)
    return sum(gemms) + _chunking_us(problem, platform) + exposed


def _backward_share(strategy: str, platform: Platform) -> float:
    """The share of a column layer's collectives that its backward leaves exposed at least."""
    if strategy == "serial":
        return 1.0
    if strategy == "megatron":
        return platform.constants.megatron_backward[platform.connections]
    return platform.constants.exposures[strategy, platform.connections].column_backward


def _collective_us(problem: Problem, platform: Platform) -> float:
    return collective_us(platform.hardware, moved_bytes(problem), problem.world_size)


def _chunking_us(problem: Problem, platform: Platform) -> float:
    """How much longer one GEMM per shard takes than one for all, where each hides a transfer."""
    N, K, ranks = problem.N_local, problem.K_local, problem.world_size
    whole, chunk = (
        gemm_us(platform.hardware, M, N, K, problem.dtype, platform.constants)
        for M in (problem.M, problem.M_shard)
    )
    return chunk + (ranks - 1) * max(chunk, shard_us(problem, platform.hardware)) - whole
