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

from dataclasses import dataclass
from typing import NamedTuple

from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.perf.constants import FITTED, Constants
from flux_megatron.perf.gemm import gemm_us
from flux_megatron.perf.hardware import Hardware
from flux_megatron.perf.operator_cost import (
    beside_us,
    collective_us,
    gemms_us,
    moved_bytes,
    predict_us,
    shard_us,
)
from flux_megatron.perf.workload import Arm
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
    """Times with what communication adds to the GEMMs, and that alone."""

    forward_us: float
    backward_us: float
    forward_exposed_us: float
    backward_exposed_us: float


@dataclass(frozen=True)
class Setting:
    """What a prediction is for, beside the layer. `connections` is CUDA_DEVICE_MAX_CONNECTIONS."""

    hardware: Hardware
    connections: str = "1"
    constants: Constants = FITTED


def cost(layer: Linear, strategy: str, setting: Setting) -> Cost:
    """Without sequence parallelism every strategy is Megatron: it all-reduces y of a row layer, and
    dx of a column layer beside wgrad.
    """
    problems = layer.forward, layer.backward
    gemms = [gemms_us(one, setting.hardware, setting.constants) for one in problems]
    forward, backward = (sum(one) for one in gemms)
    if layer.tp == 1:
        return Cost(forward, backward, 0.0, 0.0)
    if layer.sequence_parallel:
        first = max(0.0, operator_us(problems[0], strategy, setting) - forward)
        second = max(0.0, operator_us(problems[1], strategy, setting) - backward)
    else:
        all_reduce = 2 * _collective_us(problems[layer.column], setting)
        share = setting.constants.megatron_backward[setting.connections]
        hidden = beside_us(all_reduce, gemms[1][1:], share)
        first, second = (0.0, hidden) if layer.column else (all_reduce, 0.0)
    return Cost(forward + first, backward + second, first, second)


def operator_us(problem: Problem, strategy: str, setting: Setting) -> float:
    """AG+GEMM or GEMM+RS; for layout "nn" the whole backward of its layer."""
    if strategy == "auto":
        # a kernel for sm_90 where there is one, the portable one elsewhere
        ours = ("hopper" if setting.hardware.hopper else "fused", "pipelined", "megatron")
        return min(operator_us(problem, one, setting) for one in ours)
    if strategy in OURS:
        return predict_us(problem, Plan(strategy), setting.hardware, setting.constants)
    gemms = gemms_us(problem, setting.hardware, setting.constants)
    collective = _collective_us(problem, setting)
    gathers = problem.spec.gathers
    if problem.layout == "nn" and not gathers:  # two collectives, each beside a GEMM
        return sum(gemms) + beside_us(collective, gemms, _backward_share(strategy, setting))
    if strategy in ("serial", "megatron"):
        return sum(gemms) + collective
    peer = setting.constants.peers[strategy, setting.connections]
    exposed = collective * (peer.gather if gathers else peer.scatter)
    return sum(gemms) + _cut_us(problem, setting) + exposed


def _backward_share(strategy: str, setting: Setting) -> float:
    """Which part of a column layer's collectives its backward leaves exposed at least."""
    if strategy == "serial":
        return 1.0
    if strategy == "megatron":
        return setting.constants.megatron_backward[setting.connections]
    return setting.constants.peers[strategy, setting.connections].column_backward


def _collective_us(problem: Problem, setting: Setting) -> float:
    return collective_us(setting.hardware, moved_bytes(problem), problem.world_size)


def _cut_us(problem: Problem, setting: Setting) -> float:
    """What a GEMM per shard takes longer than one for all, where each hides another shard's way."""
    N, K, ranks = problem.N_local, problem.K_local, problem.world_size
    whole, part = (
        gemm_us(setting.hardware, M, N, K, problem.dtype, setting.constants)
        for M in (problem.M, problem.M_shard)
    )
    return part + (ranks - 1) * max(part, shard_us(problem, setting.hardware)) - whole
