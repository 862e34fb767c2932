"""The predicted time of AG+GEMM, GEMM+RS and GEMM+AR by our strategies, with their default plans.

A GEMM runs in waves of tiles. A transfer costs its latency and its bytes. The strategies differ in
what they overlap. For layout "nn" the time is that of the layer's whole backward: the gather,
dgrad, the scatter and wgrad.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from flux_megatron.lab.perf.gemm import gemm_us, pass_us, wgrad_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.launch.workload import ELEMENT_BYTES
from flux_megatron.overlap.hopper_pushes import chosen
from flux_megatron.problem import Problem

# The time of a call beside transfers, GEMMs and the sum: fitted to 4 x H200's operations of
# 2026-11-21 (TP 4, bf16).
CALL_OVERHEAD_US = {"hopper": 12.9, "pipelined": 19.8, "fused": 19.8}
# The tile of the kernels that wait for shards inside one GEMM.
TILE_M, TILE_N = 128, 256
# A copy engine takes as long for smaller copies with their signal (13.7 us on H200, with latency).
SMALLEST_COPY_BYTES = 2**20


def moved_bytes(problem: Problem) -> int:
    """The gathered x, or the summed y, in bytes. Sums of FP8 have 16 bits."""
    columns = problem.K if problem.spec.gathers else problem.N
    dtype = problem.dtype if problem.spec.gathers else problem.out_dtype or problem.dtype
    return problem.M * columns * ELEMENT_BYTES[dtype]


def gathered_share(problem: Problem) -> float:
    """Bytes of x that are gathered for wgrad, over those of dx that are scattered."""
    return ELEMENT_BYTES[problem.dtype] / ELEMENT_BYTES[problem.out_dtype or problem.dtype]


def shard_us(problem: Problem, hardware: Hardware) -> float:
    """A copy engine's time for one rank's shard of it, without latency."""
    return moved_bytes(problem) / problem.world_size / hardware.copy_gbps * 1e-3


def gemms_us(problem: Problem, hardware: Hardware) -> tuple[float, float]:
    """The GEMM of the pattern, and wgrad, 0 in a forward ("nt"), both without communication."""
    one = _Prediction(problem, "", hardware)
    return one.gemm_us(problem.M), one.wgrad_us()


def predict_us(problem: Problem, strategy: str, hardware: Hardware) -> float:
    """Microseconds of a call by "hopper", "fused" or "pipelined"; for "nn" of a whole backward."""
    return CALL_OVERHEAD_US[strategy] + _Prediction(problem, strategy, hardware).total_us()


class _Prediction(NamedTuple):
    problem: Problem
    strategy: str
    hardware: Hardware

    def total_us(self) -> float:
        if self.problem.spec.gathers:
            return self._gathered_us() + self.wgrad_us()
        if self.problem.spec.scatters:
            return self._scattered_us(self.wgrad_us()) + self._sum_us()
        if self.strategy == "hopper":
            others = (self.problem.world_size - 1) / self.problem.world_size
            behind = max(self._last_sums_us(), self.wgrad_us()) + self._copy_us(others)
            return self._scattered_us(0.0) + behind
        sums, remote = self._scattered_us(0.0) + self._sum_us(), self.problem.world_size - 1
        gathered = remote * shard_us(self.problem, self.hardware)  # by copy engines
        behind = max(self.hardware.copy_latency_us + gathered, self.wgrad_us())
        return sums + behind + self._copy_us(1.0)

    def gemm_us(self, M: int) -> float:
        N, K = self.problem.N_local, self.problem.K_local
        split = self.problem.split_accumulator
        return gemm_us(self.hardware, M, N, K, self.problem.dtype, split)

    def wgrad_us(self) -> float:
        """The weight's gradient [K_local, N_local] of dgrad's weight over all rows."""
        if not self.problem.is_backward:
            return 0.0
        N, K, M = self.problem.K_local, self.problem.N_local, self.problem.M
        return wgrad_us(self.hardware, N, K, M, self.problem.dtype)

    def _gathered_us(self) -> float:
        now, sources = 0.0, 0
        for shards, time_us in self._gathering():
            sources += shards
            behind = (sources - 1) * shard_us(self.problem, self.hardware)
            arrival = self.hardware.copy_latency_us + behind if sources > 1 else 0.0
            now = max(now, arrival) + time_us
        return now

    def _gathering(self) -> list[tuple[int, float]]:
        """How many more shards a stretch of the GEMM needs, and its time: library GEMMs of whole
        shards, or waves of one kernel, which begin when the rows of their last tile have arrived.
        """
        ranks, M = self.problem.world_size, self.problem.M
        if self.strategy == "pipelined":
            return [(1, self.gemm_us(self.problem.M_shard))] * ranks
        tiles = math.ceil(M / TILE_M) * math.ceil(self.problem.N_local / TILE_N)
        waves = math.ceil(tiles / self.hardware.sms)
        lasts = (min(wave * self.hardware.sms, tiles) for wave in range(1, waves + 1))
        needs = [0, *(math.ceil(last * ranks / tiles) for last in lasts)]
        return [(after - before, self.gemm_us(M) / waves) for before, after in pairwise(needs)]

    def _last_sums_us(self) -> float:
        """What `hopper`'s kernel still has to store at every rank when its last wave has ended."""
        problem = self.problem
        remote = problem.world_size - 1
        wave = self.hardware.sms * TILE_M * TILE_N * ELEMENT_BYTES[problem.dtype]
        last = min(wave, moved_bytes(problem) / problem.world_size)
        late = remote * shard_us(problem, self.hardware) - self.gemm_us(problem.M) / (remote + 1)
        return max(remote * last / self.hardware.copy_gbps * 1e-3, late)

    def _copy_us(self, share: float) -> float:
        """So much of y copied out of the gathered buffer, limited by memory."""
        return pass_us(self.hardware, 2 * share * moved_bytes(self.problem))

    def _scattered_us(self, wgrad: float) -> float:
        """Remote shards are pushed when they are ready; the local one is the last. `wgrad` comes
        before the sum; then x is gathered for it first, over the same links.
        """
        remote = self.problem.world_size - 1
        shard = shard_us(self.problem, self.hardware)
        latency_us = self.hardware.copy_latency_us
        shard_of_x = shard * gathered_share(self.problem)
        gathered = latency_us + remote * shard_of_x if wgrad else 0.0
        ready, push_us = remote * shard * self.hardware.copy_gbps / self.hardware.store_gbps, shard
        if self.strategy != "fused":  # whose GEMM stores itself, and is slower by that
            least = latency_us + SMALLEST_COPY_BYTES / self.hardware.copy_gbps * 1e-3
            ready, push_us = 0.0, max(shard, least)
        pushed, chunk = gathered, self.gemm_us(self.problem.M) / (remote + 1)
        if self.strategy == "pipelined":  # library GEMMs of whole shards
            chunk = self.gemm_us(self.problem.M_shard)
        parts = self._pushes()
        for _ in range(remote * parts):
            ready += chunk / parts
            pushed = max(pushed, ready) + push_us / parts
        ready += chunk
        arrived = pushed + latency_us
        if self.strategy == "fused":  # wgrad waits for its stores
            return max(ready, gathered + remote * shard) + wgrad
        if self.strategy == "hopper":  # the kernel reduces: wgrad begins when all has arrived
            return max(ready, arrived) + wgrad
        return max(max(ready, gathered) + wgrad, arrived)

    def _pushes(self) -> int:
        """In how many parts a rank's rows are pushed."""
        return chosen(self.problem)[1] if self.strategy == "hopper" else 1

    def _sum_us(self) -> float:
        """The sum of the partial results of all ranks, limited by memory."""
        one = moved_bytes(self.problem) / self.problem.world_size
        return pass_us(self.hardware, (self.problem.world_size + 1) * one)
