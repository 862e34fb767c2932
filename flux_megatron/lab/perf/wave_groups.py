"""Which wave groups `signalled` should make: waves of the GEMM beside a curve of the collective.

A band of rows is ready when the wave that has its last tile ends; its collective begins then, or
when that of the band before ends. Few bands hide little. Many pay the collective's latency often,
and a band of few tile rows makes the GEMM read w once more.
The end is monotone in when the bands before are sent, so the earliest prefix for each band end is
enough. That is exact but for narrow bands, which also delay those behind them: then it is within
1 % of `exhaustive`, which tries all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flux_megatron.lab.perf.constants import FITTED, Constants
from flux_megatron.lab.perf.gemm import TILES
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.lab.perf.signalled_kernels import terms_of
from flux_megatron.launch.workload import ELEMENT_BYTES
from flux_megatron.problem import Plan, Problem

UNITS = 32  # ends of bands that are considered: more cost time and gain nothing
# 2 x H200, NCCL 2.28.9, docs/results/h200x2/signalled.jsonl, rows with `cga_cluster_size` 1. SMs:
# with 32 every grouping took 17 to 26 % longer than the best.
COMM_SMS = (4, 8, 16)
# What one CTA of NCCL moves, by the trips of a collective: "signalled curve", 4 and 8 SMs, 64 to
# 200 MiB: 71 and 136 GB/s of a reduce-scatter, 83 and 160 of an all-reduce.
CTA_GBPS = {1: 17.0, 2: 20.0}
OTHER_TILE = 0.75  # share of the peak rate of a tile that `TILES` does not know


class Curve(NamedTuple):
    """Times of a collective by the bytes of its block on a rank, measured at `sizes`, rising."""

    sizes: tuple[float, ...]
    times_us: tuple[float, ...]

    def us(self, size: float) -> float:
        """Between two sizes by a line, beyond them by the nearest two."""
        place = sum(known < size for known in self.sizes[1:-1])
        (a, b), (t, u) = (pair[place : place + 2] for pair in self)
        return t + (u - t) * (size - a) / (b - a)


class Done(NamedTuple):
    """When some bands have been sent, and how long the GEMM has computed by then."""

    sent_us: float
    computed_us: float


class BandModel(Protocol):
    """When bands of `rows` rows are done, one after another. Of what `after` returns, the first
    number is the time that counts.
    """

    @property
    def rows(self) -> int: ...

    @property
    def begin(self) -> tuple[float, float]: ...

    def after(self, first: int, last: int, before: Any) -> tuple[float, float]: ...

    def finish_us(self, group_rows: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class WaveModel:
    """A GEMM that makes y [shards, rows, N] in bands, tile after tile, and its collectives.

    `sms` CTAs make a tile in `tile_us` each, if `group_m` tile rows share what they read of w; if
    not, `narrow` of it longer. Of a band of n rows a rank sends n x `row_bytes`, which takes
    `slower` times the curve and `group_us`. Without SMs of their own (`beside` false) collectives
    wait for the end of the GEMM. Until `begin_us` another collective has the links.
    """

    rows: int
    shards: int
    tile_rows: int
    tiles_n: int
    sms: int
    tile_us: float
    start_us: float
    row_bytes: int
    curve: Curve
    group_m: int = 8
    group_us: float = 0.0
    narrow: float = 0.0
    slower: float = 1.0
    beside: bool = True
    begin_us: float = 0.0

    def _tile_rows(self, rows: int) -> int:
        return self.shards * math.ceil(rows / self.tile_rows)

    @property
    def gemm_us(self) -> float:
        """The GEMM in one band."""
        tiles = self._tile_rows(self.rows) * self.tiles_n
        return self.start_us + math.ceil(tiles / self.sms) * self.tile_us

    @property
    def begin(self) -> Done:
        return Done(self.begin_us, 0.0)

    def after(self, first: int, last: int, before: Done) -> Done:
        """When rows `first` to `last` are computed and sent."""
        tile_rows = self._tile_rows(last - first)
        longer = 1 + self.narrow * max(0.0, 1 / tile_rows - 1 / self.group_m)
        computed = before.computed_us + tile_rows * self.tiles_n / self.sms * self.tile_us * longer
        wave = -self._tile_rows(last) * self.tiles_n % self.sms / self.sms * self.tile_us
        ready = self.start_us + computed + wave
        if not self.beside:
            ready = max(ready, self.gemm_us)
        sending = self.group_us + self.slower * self.curve.us((last - first) * self.row_bytes)
        return Done(max(ready, before.sent_us) + sending, computed)

    def finish_us(self, group_rows: Sequence[int]) -> float:
        """When all is sent, for a plan's `group_rows`."""
        return finish_us(self, group_rows)


def finish_us(model: BandModel, group_rows: Sequence[int]) -> float:
    """When all bands are done, for a plan's `group_rows`."""
    first, done = 0, model.begin
    for size in (*group_rows, model.rows):
        last = min(first + size, model.rows)
        if last > first:
            done = model.after(first, last, done)
        first = last
    return done[0]


def model_of(
    problem: Problem, plan: Plan, hardware: Hardware, constants: Constants = FITTED,
    curve: Curve | None = None,
) -> WaveModel:  # fmt: skip
    """The model of a plan's tile and `comm_sms`; in a backward NCCL gathers x first. `curve` is
    that of a communicator of so many SMs, by default what the facts say of NCCL.
    """
    terms = terms_of(problem, plan, hardware)
    tile, shards = plan.tile, problem.world_size if problem.spec.scatters else 1
    rate = constants.gemm_rate * hardware.tflops.get(problem.dtype, hardware.tflops["float32"])
    share = TILES.get((tile.block_m, tile.block_n), OTHER_TILE)
    flops = 2 * tile.block_m * tile.block_n * problem.K_local
    area = tile.block_m * tile.block_n / (128 * 256)
    element = ELEMENT_BYTES[problem.dtype]
    gbps = hardware.nccl_gbps
    if plan.comm_sms:
        gbps = min(gbps, plan.comm_sms * CTA_GBPS[problem.spec.trips])
    gather = nccl_curve(problem, hardware, hardware.nccl_gbps) if problem.is_backward else None
    return WaveModel(
        rows=problem.M // shards,
        shards=shards,
        tile_rows=tile.block_m,
        tiles_n=math.ceil(problem.N_local / tile.block_n),
        sms=max(1, hardware.sms - plan.comm_sms),
        tile_us=flops * hardware.sms / (rate * share * 1e6) + area * terms.tile_us,
        start_us=hardware.launch_us,
        row_bytes=shards * problem.N_local * element,
        curve=curve or nccl_curve(problem, hardware, gbps),
        group_m=tile.group_m,
        group_us=terms.group_us if curve else 0.0,  # the facts' latency, 32 us a trip, has it
        narrow=terms.narrow,
        slower=terms.beside,
        beside=plan.comm_sms > 0,
        begin_us=gather.us(problem.M * problem.columns_moved * element) if gather else 0.0,
    )


def nccl_curve(problem: Problem, hardware: Hardware, gbps: float) -> Curve:
    """NCCL's latency, and a rate for what a rank receives."""
    received = problem.spec.trips * (problem.world_size - 1) / problem.world_size
    size, latency = 2.0**30, problem.spec.trips * hardware.nccl_latency_us
    return Curve((0.0, size), (latency, latency + received * size / gbps * 1e-3))
