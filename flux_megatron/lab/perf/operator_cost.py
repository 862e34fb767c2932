"""The predicted time of an operation, by plan. It is good enough to drop hopeless candidates, to
choose without a measurement, and to predict the time of a layer.

A GEMM runs in waves of tiles. A transfer costs its latency and its bytes. The strategies differ in
what they overlap. For layout "nn" the time is that of the layer's whole backward: the gather,
dgrad, the scatter and wgrad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from flux_megatron.lab.perf.all_reduce import Protocol, all_reduce_us, exposed_share
from flux_megatron.lab.perf.band_plans import gather_model
from flux_megatron.lab.perf.constants import FITTED, Constants
from flux_megatron.lab.perf.gemm import gemm_us, pass_us, wgrad_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.wave_groups import model_of
from flux_megatron.launch.workload import ELEMENT_BYTES
from flux_megatron.problem import Plan, Problem

# The tile of the kernels that wait for shards inside one GEMM.
TILE_M, TILE_N = 128, 256
# A copy engine takes as long for smaller copies with their signal (13.7 us on H200, with latency).
SMALLEST_COPY_BYTES = 2**20
# NCCL's all-gather and reduce-scatter of few bytes, like `all_reduce.PROTOCOLS`: 9 % off in the
# median, of .03 to 2 MB that a rank receives (2 x H200, 2026-11-24, few_rows_bench.jsonl).
FEW_BYTES = Protocol(latency_us=7.0, share=0.37)
# Assumed: the SMs that NCCL's kernels hold while a call runs beside them. GEMMs of M = 8192 took
# 12 % longer beside an all-reduce (2 x H200, 2026-11-22), as without 14 of 132 SMs.
NCCL_SMS = 16
# From the last MMA of a tile on one rank to its sum on all, by words with their epochs: what
# `low_latency` takes beyond the library's GEMM alone and its words' time on the link, the median of
# M = 1 to 16 (2 x H200, 2026-11-22, docs/results/h200x2/gemv_ar.jsonl). Predictions of those rows
# are 8 % off on average, for a layer at most 10 %; at M = 64, where the kernel's own GEMM is slower
# than the library's, up to 22 % too short.
WORDS_TRIP_US = 1.9
# The rate at which AG+GEMM's words become rows in this GPU's memory, as a share of a copy engine's,
# when each store of a warp wrote a quarter of a sector.
# The prediction of what they take beyond the library's GEMM is 3.9 us off at most for M = 4 to 64,
# but up to 9.5 us too short where N is 28672 (2 x H200, 2026-11-24, few_rows_bench.jsonl).
STAGED = 0.25
# What one library GEMM behind a gather by copy engines takes beside both: -2.9 to 3 us in 12 shapes
# of M = 4 to 496 (2 x H100, 2026-11-25, docs/results/h100x2/{held_out,k_parts}.jsonl).
ONE_GEMM_US = 1.0


def collective_us(hardware: Hardware, size_bytes: int, world_size: int) -> float:
    """NCCL's all-gather to, or reduce-scatter of, `size_bytes` on each rank."""
    received = size_bytes * (world_size - 1) / world_size
    many_us = hardware.nccl_latency_us + received / hardware.nccl_gbps * 1e-3
    few_gbps = FEW_BYTES.share * hardware.nccl_gbps
    return min(many_us, FEW_BYTES.latency_us + received / few_gbps * 1e-3)


def moved_bytes(problem: Problem) -> int:
    """The matrix that is gathered or scattered, in bytes."""
    return problem.M * problem.columns_moved * ELEMENT_BYTES[problem.dtype]


def shard_us(problem: Problem, hardware: Hardware) -> float:
    """A copy engine's time for one rank's shard of it, without latency."""
    return moved_bytes(problem) / problem.world_size / hardware.copy_gbps * 1e-3


def predict_us(
    problem: Problem, plan: Plan, hardware: Hardware, constants: Constants = FITTED,
    connections: str = "1",
) -> float:  # fmt: skip
    """The time of `plan` in microseconds; for "nn" that of the layer's whole backward.
    `connections` is CUDA_DEVICE_MAX_CONNECTIONS or "unset".
    """
    left = left_by_others(problem, hardware)
    return _Prediction(problem, plan, left, constants, connections).total_us()


def gemms_us(
    problem: Problem, hardware: Hardware, constants: Constants = FITTED
) -> tuple[float, float]:
    """The GEMM of the pattern, and wgrad, 0 in a forward ("nt"), both without communication."""
    left = left_by_others(problem, hardware)
    one = _Prediction(problem, Plan("sequential"), left, constants)
    return one.gemm_us(problem.M), one.wgrad_us()


def is_one_gemm(problem: Problem, plan: Plan) -> bool:
    """Whether copy engines gather, then one library GEMM multiplies."""
    return plan.strategy == "pipelined" and plan.splits == 1 and problem.spec.gathers


def beside_us(collective: float, gemms: Sequence[float], share: float) -> float:
    """The exposed time of a collective beside each of `gemms`: at least `share` of it, because both
    need SMs, or the time by which it is longer than the GEMM.
    """
    return sum(max(share * collective, collective - gemm) for gemm in gemms)


def left_by_others(problem: Problem, hardware: Hardware) -> Hardware:
    """The GPU without the SMs that other kernels hold beside the call, for every strategy alike."""
    if not problem.beside:
        return hardware
    sms = hardware.sms - NCCL_SMS
    share = sms / hardware.sms
    rates = {dtype: rate * share for dtype, rate in hardware.tflops.items()}
    return replace(hardware, sms=sms, tflops=rates)


class Stretch(NamedTuple):
    """A stretch of the GEMM, which needs, or completes, `shards` more shards."""

    shards: int
    time_us: float


class _Prediction(NamedTuple):
    problem: Problem
    plan: Plan
    hardware: Hardware
    constants: Constants
    connections: str = "1"

    def total_us(self) -> float:
        if self.plan.strategy == "sequential":
            return self._sequential_us()
        if self.plan.strategy == "signalled":
            return self._signalled_us()
        if self.plan.strategy == "low_latency":
            return self.gemm_us(self.problem.M) + self._words_us() + self.wgrad_us()
        call_overhead_us = self.constants.call_overhead_us[self.plan.strategy]
        if is_one_gemm(self.problem, self.plan):
            call_overhead_us = ONE_GEMM_US
        if self.problem.spec.gathers:
            return call_overhead_us + self._gathered_us() + self.wgrad_us()
        if self.problem.spec.scatters:
            return call_overhead_us + self._scattered_us(self.wgrad_us()) + self._sum_us()
        if self.plan.strategy == "hopper":
            others = (self.problem.world_size - 1) / self.problem.world_size
            behind = max(self._last_sums_us(), self.wgrad_us()) + self._copy_us(others)
            return call_overhead_us + self._scattered_us(0.0) + behind
        sums = self._scattered_us(0.0) + self._sum_us()
        behind = max(self._gathered_back_us(), self.wgrad_us()) + self._copy_us(1.0)
        return call_overhead_us + sums + behind

    def gemm_us(self, M: int) -> float:
        """M rows of the local GEMM."""
        N, K = self.problem.N_local, self.problem.K_local
        return gemm_us(self.hardware, M, N, K, self.problem.dtype, self.constants)

    def wgrad_us(self) -> float:
        """The weight's gradient [K_local, N_local] of dgrad's weight over all rows."""
        if not self.problem.is_backward:
            return 0.0
        N, K, M = self.problem.K_local, self.problem.N_local, self.problem.M
        return wgrad_us(self.hardware, N, K, M, self.problem.dtype, self.constants)

    def _sequential_us(self) -> float:
        gemms = self.gemm_us(self.problem.M), self.wgrad_us()
        size_bytes = moved_bytes(self.problem)
        collective = collective_us(self.hardware, size_bytes, self.problem.world_size)
        if self.problem.is_backward and self.problem.spec.scatters:
            # the gather of x under dgrad and the scatter of dx under wgrad, of the same size
            share = self.constants.megatron_backward["1"]
            return sum(gemms) + beside_us(collective, gemms, share)
        if self.problem.spec.trips == 1:
            return sum(gemms) + collective
        summed = all_reduce_us(self.hardware, size_bytes, self.problem.world_size)
        if self.problem.is_backward:
            summed = beside_us(summed, gemms[1:], exposed_share(self.connections))
        return sum(gemms) + summed

    def _signalled_us(self) -> float:
        """Bands of rows are sent while later ones, and in a backward wgrad, are computed."""
        given = (self.problem, self.plan, self.hardware, self.constants)
        if self.problem.spec.gathers:
            # no gain without a measurement: beside a library's full grid collectives find no SM,
            # and the model was 5 to 60 % short (2 x H200, 2026-11-23, signalled_bands.jsonl)
            in_bands = gather_model(*given).finish_us(self.plan.group_rows) + self.wgrad_us()
            return max(self._sequential_us(), in_bands)
        model = model_of(*given)
        computed = max(model.gemm_us, model.begin_us) + self.wgrad_us()
        return max(computed, model.finish_us(self.plan.group_rows))

    def _latency_us(self) -> float:
        sm = self.plan.transport == "sm"
        return self.hardware.launch_us if sm else self.hardware.copy_latency_us

    def _words_us(self) -> float:
        """Partials from all ranks to all, or to their owners, and back; or rows to all, and through
        this GPU's memory, which takes a trip and `STAGED`. Half of each word is data.
        """
        spec, trips = self.problem.spec, 1
        others = self.problem.world_size - 1.0
        if self.plan.two_phase:
            others, trips = 2 * others / self.problem.world_size, 2
        elif spec.scatters or spec.gathers:
            others, trips = others / self.problem.world_size, 2 if spec.gathers else 1
        words = 2 * moved_bytes(self.problem) * others
        rate = self.hardware.copy_gbps * (STAGED if spec.gathers else 1.0)
        return trips * WORDS_TRIP_US + words / rate * 1e-3

    def _stores_us(self) -> float:
        """How much a GEMM slows down when its SMs write into peers' memory."""
        ranks = self.problem.world_size
        remote = moved_bytes(self.problem) * (ranks - 1) / ranks
        return remote / self.hardware.store_gbps * 1e-3

    def _gathered_us(self) -> float:
        """The local shard at once, then the remote shards as they arrive."""
        now = self._stores_us() if self.plan.transport == "sm" else 0.0
        sources = 0
        for stretch in self._gathering():
            sources += stretch.shards
            arrival = self._latency_us() + (sources - 1) * shard_us(self.problem, self.hardware)
            now = max(now, arrival if sources > 1 else 0.0) + stretch.time_us
        return now

    def _gathering(self) -> Sequence[Stretch]:
        """Library GEMMs of whole shards, or the waves of one kernel, each of which begins when
        the rows of its last tile have arrived.
        """
        ranks, M = self.problem.world_size, self.problem.M
        if self.plan.strategy == "pipelined":
            sizes = {0: [1] * ranks, 1: [ranks]}.get(self.plan.splits, [1, ranks - 1])
            return [Stretch(n, self.gemm_us(n * self.problem.M_shard)) for n in sizes]
        tiles = math.ceil(M / TILE_M) * math.ceil(self.problem.N_local / TILE_N)
        waves = math.ceil(tiles / self.hardware.sms)
        needs = [0]
        for wave in range(1, waves + 1):
            last = min(wave * self.hardware.sms, tiles)
            needs.append(math.ceil(last * ranks / tiles))
        time_us = self.gemm_us(M) / waves
        return [Stretch(after - before, time_us) for before, after in pairwise(needs)]

    def _gathered_back_us(self) -> float:
        """The all-gather of the sums by copy engines."""
        remote = self.problem.world_size - 1
        return self.hardware.copy_latency_us + remote * shard_us(self.problem, self.hardware)

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
        gathered = self._latency_us() + remote * shard if wgrad else 0.0
        by_sm = self.plan.strategy == "fused" or self.plan.transport == "sm"
        ready = self._stores_us() if by_sm else 0.0
        pushed, left = gathered, remote
        for stretch in self._scattering():
            ready += stretch.time_us
            pushed = max(pushed, ready if left else 0.0)
            pushed += min(stretch.shards, left) * max(shard, self._operations_us())
            left -= min(stretch.shards, left)
        arrived = pushed + self._latency_us()
        if self.plan.strategy == "fused":  # the GEMM itself stores: wgrad waits for it
            return max(ready, gathered + remote * shard) + wgrad
        if self.plan.strategy == "hopper":  # the kernel reduces: wgrad begins when all has arrived
            return max(ready, arrived) + wgrad
        return max(max(ready, gathered) + wgrad, arrived)

    def _operations_us(self) -> float:
        """The copy engine's least time for the pushes of a shard, one after another."""
        if self.plan.strategy == "fused" or self.plan.transport == "sm":
            return 0.0
        pushes = math.ceil(self.problem.M_shard / (self.plan.comm_rows or self.problem.M_shard))
        smallest = SMALLEST_COPY_BYTES / self.hardware.copy_gbps * 1e-3
        return pushes * (self.hardware.copy_latency_us + smallest)

    def _scattering(self) -> Sequence[Stretch]:
        """Library GEMMs of whole shards, or shares of one kernel."""
        ranks, M = self.problem.world_size, self.problem.M
        if self.plan.strategy != "pipelined":
            return [Stretch(1, self.gemm_us(M) / ranks)] * ranks
        sizes = [ranks] if self.plan.splits else [1] * ranks
        return [Stretch(n, self.gemm_us(n * self.problem.M_shard)) for n in sizes]

    def _sum_us(self) -> float:
        """The sum of the partial results of all ranks, limited by memory."""
        one = moved_bytes(self.problem) / self.problem.world_size
        return pass_us(self.hardware, (self.problem.world_size + 1) * one)
