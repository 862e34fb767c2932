"""A tensor-parallel linear layer's forward and backward, by the strategy that runs it.

| strategy | forward | backward of a column layer | of a row layer |
| --- | --- | --- | --- |
| megatron | NCCL and GEMM, one after the other | x gathered under dgrad, dx scattered under wgrad | as forward |
| hopper, fused, pipelined | ours, see `operator_cost` | the same | the same |
| auto | the fastest of ours and megatron | the same | the same |
| signalled, mailboxes | ours between GPUs that share no memory, see there | the same | the same |
| te | a library GEMM per shard | a collective beside each GEMM | as forward |

CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron requires before Blackwell.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flux_megatron.lab.perf import mailboxes, signalled
from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.gemm import gemm_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.operator_cost import (
    gathered_share,
    gemms_us,
    moved_bytes,
    predict_us,
    shard_us,
)
from flux_megatron.launch.workload import FP8, Arm
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Problem

STRATEGY: dict[Arm, str] = {"megatron": "megatron", "te": "te", "flux": "auto"}
# Shares of collectives that stay exposed, fitted to 4 x H200's operations of 2026-11-21 (TP 4,
# bf16; no number is fitted to a published speedup): in the backward of a column layer, which has
# two, and beyond the cost of one GEMM per shard in userbuffers' AG+GEMM and GEMM+RS.
COLUMN_BACKWARD = {"megatron": 0.325, "te": 0.529}
# The same where GPUs share no memory, by the steps of stock Megatron of 2026-11-30 over host memory
# (2 x H200, three models).
COLUMN_BACKWARD_APART = 0.1
USERBUFFERS_GATHER, USERBUFFERS_SCATTER = 0.204, 0.346
# Of an all-reduce beside wgrad, where wgrad is longer: it is enqueued first and gets its SMs first.
ALL_REDUCE_BACKWARD = 0.12


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
    fp8: bool = False

    @property
    def forward(self) -> Problem:
        pattern = COLUMN if self.column else ROW
        if self.fp8:
            return Problem(pattern, self.M, self.N, self.K, FP8, self.tp, out_dtype=self.dtype)
        return Problem(pattern, self.M, self.N, self.K, self.dtype, self.tp)

    @property
    def backward(self) -> Problem:
        return replace(self.forward.dual, split_accumulator=self.fp8)


class Cost(NamedTuple):
    """Whole times, and the exposed communication in them."""

    forward_us: float
    backward_us: float
    forward_exposed_us: float
    backward_exposed_us: float


def cost(layer: Linear, strategy: str, hardware: Hardware) -> Cost:
    """The cost of a layer. Without sequence parallelism a row layer's forward all-reduces y, and a
    column layer's backward dx, beside wgrad.
    """
    problems = layer.forward, layer.backward
    forward, backward = gemms = [sum(gemms_us(one, hardware)) for one in problems]
    if layer.tp == 1:
        return Cost(forward, backward, 0.0, 0.0)
    if layer.sequence_parallel:
        first, second = (
            max(0.0, operator_us(problem, strategy, hardware) - us)
            for problem, us in zip(problems, gemms, strict=True)
        )
    else:
        reduced = replace(problems[layer.column], pattern=Pattern.GEMM_AR)
        exposed = operator_us(reduced, strategy, hardware) - gemms[layer.column]
        first, second = (0.0, exposed) if layer.column else (exposed, 0.0)
    return Cost(forward + first, backward + second, first, second)


def operator_us(problem: Problem, strategy: str, hardware: Hardware) -> float:
    """AG+GEMM, GEMM+RS or GEMM+AR; for layout "nn" the whole backward of its layer."""
    if strategy == "auto":
        # the kernel for sm_90 on Hopper GPUs, the portable one elsewhere
        by_peers = ("hopper" if hardware.hopper else "fused", "pipelined")
        apart = ("signalled", "mailboxes") if hardware.mailboxes else ("signalled",)
        ours = by_peers if hardware.peers else apart
        return min(operator_us(problem, one, hardware) for one in (*ours, "megatron"))
    if strategy in ("hopper", "fused", "pipelined"):
        return predict_us(problem, strategy, hardware)
    gemms = gemms_us(problem, hardware)
    if strategy == "signalled":
        return signalled.predict_us(problem, hardware, moved_bytes(problem), gemms[1])
    if strategy == "mailboxes":
        share_of_x = gathered_share(problem)
        return mailboxes.predict_us(problem, hardware, moved_bytes(problem), share_of_x, gemms)
    if problem.pattern is Pattern.GEMM_AR:  # userbuffers have none
        summed = all_reduce_us(hardware, moved_bytes(problem), problem.world_size)
        if problem.is_backward:
            summed = _beside_us(summed, gemms[1:], ALL_REDUCE_BACKWARD)
        return sum(gemms) + summed
    collective = collective_us(hardware, moved_bytes(problem), problem.world_size)
    gathers = problem.spec.gathers
    if problem.is_backward and not gathers:  # two collectives, each beside a GEMM
        moved = collective * gathered_share(problem), collective
        exposed = COLUMN_BACKWARD[strategy] if hardware.peers else COLUMN_BACKWARD_APART
        return sum(gemms) + sum(
            _beside_us(one, [gemm], exposed) for one, gemm in zip(moved, gemms, strict=True)
        )
    if strategy == "megatron":
        return sum(gemms) + collective
    exposed = collective * (USERBUFFERS_GATHER if gathers else USERBUFFERS_SCATTER)
    return sum(gemms) + _chunking_us(problem, hardware) + exposed


def _beside_us(collective: float, gemms: Sequence[float], share: float) -> float:
    """The exposed time of a collective beside each of `gemms`: at least `share` of it, because both
    need SMs, or the time by which it is longer than the GEMM.
    """
    return sum(max(share * collective, collective - gemm) for gemm in gemms)


def _chunking_us(problem: Problem, hardware: Hardware) -> float:
    """How much longer one GEMM per shard takes than one for all, where each hides a transfer."""
    N, K, ranks = problem.N_local, problem.K_local, problem.world_size
    whole, chunk = (
        gemm_us(hardware, M, N, K, problem.dtype, problem.split_accumulator)
        for M in (problem.M, problem.M_shard)
    )
    return chunk + (ranks - 1) * max(chunk, shard_us(problem, hardware)) - whole
