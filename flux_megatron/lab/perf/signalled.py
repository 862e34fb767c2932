"""The predicted time of `signalled`, whose bands of rows travel by NCCL beside a GEMM, as between
GPUs that share no memory.

Times are microseconds. Every call has the fastest of the plans that races try.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.gemm import gemm_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.overlap import band_shares
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Problem

TILE_M, TILE_N = 128, 256
# Fitted to the 96 calls of docs/results/h200x2/machines.jsonl of 2026-11-29 (2 x H200 that NCCL
# joins through host memory, ab8e31bf and b3a3e96b), with their own times of GEMM and collective:
# 5 % off in the root mean square, 13 % too short to 9 % too long. Gathers had a GEMM a band then;
# today's ten (f9cb4548, 9ded3eb8) are 6 % too short to 3 % too long.
BESIDE = 1.2  # a GEMM beside collectives of several communicators, by its time alone
TURNS = 0.95  # collectives of communicators that take turns, by the time of one collective
EDGE_US = 156.0  # in which no bytes travel: bands begin and end in it, once where they take turns


def predict_us(problem: Problem, hardware: Hardware, moved_bytes: int, behind: float) -> float:
    """AG+GEMM, GEMM+RS or GEMM+AR of `moved_bytes`; GEMMs of `behind` follow on the caller's
    stream, and in a column layer's backward x is gathered first.
    """
    rows = band_shares.rows_of(problem)
    return min(
        _of_plan(problem, [*first, rows - sum(first)], communicators, hardware, moved_bytes, behind)
        for shares, communicators in band_shares.shares_of(problem)
        for first in [band_shares.group_rows_of(rows, TILE_M, shares)]
    )


def _of_plan(
    problem: Problem, bands: Sequence[int], communicators: int, hardware: Hardware,
    moved_bytes: int, behind: float,
) -> float:  # fmt: skip
    beside, turns, edge = (BESIDE, TURNS, 0.0) if communicators > 1 else (1.0, 1.0, EDGE_US)
    times_us = _alone(problem, hardware, moved_bytes)
    travel = turns * max(0.0, times_us - EDGE_US)
    travels = [travel * rows / sum(bands) + edge for rows in bands]
    last_us = EDGE_US - edge
    multiply = _Gemm(problem, communicators, hardware, beside)
    if problem.spec.gathers:
        multiply.busy_until = sum(travels) + last_us
        multiply.rows(sum(bands))  # the local shard
        arrived = last_us
        for rows, us in zip(bands, travels, strict=True):
            arrived += us
            multiply.idle_until(arrived)
            multiply.rows((problem.world_size - 1) * rows)
        return multiply.now + behind
    if problem.spec.scatters and behind:
        multiply.busy_until = times_us
    shards = problem.world_size if problem.spec.scatters else 1
    for rows, us in zip(bands, travels, strict=True):
        multiply.rows(shards * rows)
        multiply.busy_until = max(multiply.busy_until, multiply.now) + us
    multiply.us(behind)
    return max(multiply.now, multiply.busy_until + last_us)


def _alone(problem: Problem, hardware: Hardware, moved_bytes: int) -> float:
    collective = all_reduce_us if problem.pattern is Pattern.GEMM_AR else collective_us
    return collective(hardware, moved_bytes, problem.world_size)


class _Gemm:
    """A clock of waves of tiles, slower until the link is idle, at `busy_until`."""

    def __init__(
        self, problem: Problem, communicators: int, hardware: Hardware, beside: float
    ) -> None:
        self.beside = beside
        self.sms = hardware.sms - communicators * band_shares.SMS_OF_ONE
        if problem.spec.gathers:
            self.sms -= band_shares.SMS_OF_OTHERS
        self.columns = math.ceil(problem.N_local / TILE_N)
        whole = gemm_us(
            hardware, problem.M, problem.N_local, problem.K_local, problem.dtype,
            problem.split_accumulator,
        )  # fmt: skip
        self.wave_us = whole / math.ceil(self._tiles(problem.M) / hardware.sms)
        self.tiles, self.now, self.busy_until = 0, 0.0, 0.0

    def idle_until(self, us: float) -> None:
        """No tile begins before, where the clock is not there yet."""
        if us > self.now:
            self.now, self.tiles = us, 0

    def rows(self, rows: int) -> None:
        """Behind the tiles before, in one kernel."""
        before = self.tiles
        self.tiles = before + self._tiles(rows)
        waves = math.ceil(self.tiles / self.sms) - math.ceil(before / self.sms)
        self.us(waves * self.wave_us)

    def us(self, alone: float) -> None:
        """What takes so long alone."""
        left = max(0.0, self.busy_until - self.now)
        self.now += min(alone * self.beside, alone + left * (1 - 1 / self.beside))

    def _tiles(self, rows: int) -> int:
        return math.ceil(rows / TILE_M) * self.columns
