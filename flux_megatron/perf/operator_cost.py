"""What an operation ought to take, by plan: good enough to drop hopeless candidates, and to choose
where nothing has been measured.

A GEMM runs in waves of tiles; a transfer costs its latency and its bytes; the strategies differ in
what runs beside what. For layout "nn" the time is that of the layer's whole backward: the gather,
dgrad, the scatter and wgrad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flux_megatron.perf.hardware import Hardware
from flux_megatron.problem import Pattern, Plan, Problem

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# The tiles a library chooses from, and the share of the peak rate that each can reach.
TILES = {
    (128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.96, (128, 128): 0.9,
    (64, 256): 0.85, (64, 128): 0.75, (64, 64): 0.5,
}  # fmt: skip

# Collectives beside a GEMM take multiprocessors from it. Megatron-core's backward of a column layer
# (8192 x 12288 x 12288 on 4 x H200) keeps this share of its collectives exposed.
EXPOSED_BESIDE_GEMM = 0.3


def gemm_us(hardware: Hardware, M: int, N: int, K: int, dtype: str) -> float:
    """The library's [M, K] @ [K, N]: waves of the best tile, not faster than memory allows."""
    rate = hardware.tflops.get(dtype, hardware.tflops["float32"]) * 1e6 / hardware.multiprocessors
    waves_us = min(
        math.ceil(math.ceil(M / rows) * math.ceil(N / columns) / hardware.multiprocessors)
        * 2 * rows * columns * K / (rate * share)
        for (rows, columns), share in TILES.items()
    )  # fmt: skip
    size_bytes = (M * K + K * N + M * N) * ELEMENT_BYTES[dtype]
    return hardware.launch_us + max(waves_us, size_bytes / hardware.memory_gbps * 1e-3)


def collective_us(hardware: Hardware, size_bytes: int, world_size: int) -> float:
    """NCCL's all-gather to, or reduce-scatter of, `size_bytes` on each rank."""
    received = size_bytes * (world_size - 1) / world_size
    return hardware.nccl_latency_us + received / hardware.nccl_gbps * 1e-3


def moved_bytes(problem: Problem) -> int:
    """The matrix that is gathered or scattered, in bytes."""
    columns = problem.K if problem.pattern is Pattern.AG_GEMM else problem.N
    return problem.M * columns * ELEMENT_BYTES[problem.dtype]


def predict_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """The time of `plan` in microseconds; for "nn" that of the layer's whole backward."""
    if plan.strategy == "sequential":
        return _sequential_us(problem, hardware)
    parts = _parts(problem, plan, hardware)
    wgrad_us = _wgrad_us(problem, hardware)
    if problem.pattern is Pattern.AG_GEMM:
        return _gathered_us(problem, plan, parts, hardware) + wgrad_us
    sum_us = _sum_us(problem, hardware)
    if plan.strategy == "fused":
        return (
            sum(part.time_us for part in parts) + _stores_us(problem, hardware) + wgrad_us + sum_us
        )
    return _scattered_us(problem, plan, parts, wgrad_us, hardware) + sum_us


def exposed_us(problem: Problem, plan: Plan, hardware: Hardware) -> float:
    """What the communication adds to the GEMMs' time under `plan`, in microseconds."""
    gemms = _local_gemm_us(problem, hardware, problem.M) + _wgrad_us(problem, hardware)
    return max(0.0, predict_us(problem, plan, hardware) - gemms)


def _local_gemm_us(problem: Problem, hardware: Hardware, M: int) -> float:
    return gemm_us(hardware, M, problem.N_local, problem.K_local, problem.dtype)


def _wgrad_us(problem: Problem, hardware: Hardware) -> float:
    """The weight's gradient [N_local or K_local, ...] over all rows, in a backward."""
    if problem.layout == "nt":
        return 0.0
    return gemm_us(hardware, problem.K_local, problem.N_local, problem.M, problem.dtype)


def _sequential_us(problem: Problem, hardware: Hardware) -> float:
    gemms = _local_gemm_us(problem, hardware, problem.M) + _wgrad_us(problem, hardware)
    collective = collective_us(hardware, moved_bytes(problem), problem.world_size)
    if problem.layout == "nn" and problem.pattern is Pattern.GEMM_RS:
        # the gather of x under dgrad and the scatter of dx under wgrad, of the same size
        return gemms + 2 * collective * EXPOSED_BESIDE_GEMM
    return gemms + collective


class Part(NamedTuple):
    """A stretch of the GEMM: of how many ranks' shards, and its time."""

    shards: int
    time_us: float


def _parts(problem: Problem, plan: Plan, hardware: Hardware) -> list[Part]:
    """The GEMM in the order of its work: library GEMMs of their own, or shares of one kernel."""
    ranks = problem.world_size
    if plan.strategy != "pipelined":
        return [Part(1, _local_gemm_us(problem, hardware, problem.M) / ranks)] * ranks
    sizes = [1] * ranks
    if plan.splits:  # as few as there can be: in AG own rows and all others
        sizes = [1, ranks - 1] if problem.pattern is Pattern.AG_GEMM else [ranks]
    return [Part(n, _local_gemm_us(problem, hardware, n * problem.M_shard)) for n in sizes]


def _shard_us(problem: Problem, hardware: Hardware) -> float:
    return moved_bytes(problem) / problem.world_size / hardware.copy_gbps * 1e-3


def _latency_us(plan: Plan, hardware: Hardware) -> float:
    return hardware.launch_us if plan.transport == "sm" else hardware.copy_latency_us


def _stores_us(problem: Problem, hardware: Hardware) -> float:
    """How much a GEMM slows down when its multiprocessors write into peers' memory."""
    remote = moved_bytes(problem) * (problem.world_size - 1) / problem.world_size
    return remote / hardware.store_gbps * 1e-3


def _gathered_us(problem: Problem, plan: Plan, parts: Sequence[Part], hardware: Hardware) -> float:
    """Own rows at once, then each peer's as they arrive."""
    now = _stores_us(problem, hardware) if plan.transport == "sm" else 0.0
    sources = 0
    for part in parts:
        sources += part.shards
        arrival = _latency_us(plan, hardware) + (sources - 1) * _shard_us(problem, hardware)
        now = max(now, arrival if sources > 1 else 0.0) + part.time_us
    return now


def _scattered_us(
    problem: Problem, plan: Plan, parts: Sequence[Part], wgrad_us: float, hardware: Hardware
) -> float:
    """Shards for peers are pushed when they are ready; the own one is the last."""
    ready = _stores_us(problem, hardware) if plan.transport == "sm" else 0.0
    pushed, left = 0.0, problem.world_size - 1
    for part in parts:
        ready += part.time_us
        pushed = max(pushed, ready if left else 0.0)
        pushed += min(part.shards, left) * _shard_us(problem, hardware)
        left -= min(part.shards, left)
    arrived = pushed + _latency_us(plan, hardware)
    if plan.strategy == "hopper":  # its kernel adds up: wgrad begins when all has come
        return max(ready, arrived) + wgrad_us
    return max(ready + wgrad_us, arrived)


def _sum_us(problem: Problem, hardware: Hardware) -> float:
    """The sum of the partial results of all ranks, limited by memory."""
    one = moved_bytes(problem) / problem.world_size
    return hardware.launch_us + (problem.world_size + 1) * one / hardware.memory_gbps * 1e-3
