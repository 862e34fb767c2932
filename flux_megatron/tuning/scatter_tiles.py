"""The tiles of `hopper`'s GEMM+RS, one after another: what the tile, the communication tile and the
transport of a plan are worth.

Each CTA takes the next tile, those of remote shards first. A communication tile is sent when its
last tile is made: by the copy engine one after another, or tile by tile by the SMs. A local tile
waits for what the peers have made of it. All ranks do the same at the same time, so what arrives
here is what this rank sends.

Early tiles split along K (`Plan.split_k_shards`) are drawn whole: with their parts as
`kernels.split_k` has them, the choice among the shipped entries' plans was worse.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.gemm import ELEMENT_BYTES
from flux_megatron.perf.hardware import Hardware
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.tuning.tiles import PUSH_SHARE, WIDE, area, in_groups, main_loop_us

COMM_TILES_MAX = 8  # of a shard, as in the kernel
ADD_US = 1.5  # a peer's tile added to the sum, fetched beside the main loop
FETCH_US = 3.0  # the same behind it, where no other tile is left to be made: fetched, then added


class _Machine(NamedTuple):
    """What of the hardware counts here; `pushes_begin_us`: another transfer has the links before.

    `slower_us` is what stores into a peer's memory add to a wide tile.
    """

    sms: int
    tflops: float
    copy_latency_us: float
    copy_gbps: float
    signal_us: float
    slower_us: float
    pushes_begin_us: float


class _Place(NamedTuple):
    """A tile's shard, as ranks between this one and its owner, and its communication tile."""

    hops: int
    comm_tile: int


def tiles_us(
    problem: Problem, plan: Plan, hardware: Hardware, pushes_begin_us: float = 0.0
) -> float:
    """When the last tile of GEMM+RS is done; nothing is sent before `pushes_begin_us`."""
    by_sm = plan.transport == "sm"
    wide_bytes = WIDE * ELEMENT_BYTES[problem.dtype]
    machine = _Machine(
        hardware.sms, hardware.tflops[problem.dtype], hardware.copy_latency_us, hardware.copy_gbps,
        hardware.launch_us, wide_bytes * hardware.sms / hardware.store_gbps * 1e-3 * by_sm,
        pushes_begin_us,
    )  # fmt: skip
    return _tiles_us(problem, plan.tile, plan.comm_rows or problem.M_shard, by_sm, machine)


@lru_cache(maxsize=4096)  # known plans are asked for with each new kind of call
def _tiles_us(
    problem: Problem, tile: Tile, comm_rows: int, by_sm: bool, machine: _Machine
) -> float:
    tile_us = main_loop_us(problem, tile, machine.sms, machine.tflops)
    around_us = area(tile) * FITTED.tile_us
    remote, local = _order(
        math.ceil(problem.M_shard / tile.block_m), math.ceil(problem.N_local / tile.block_n),
        tile.group_m, problem.world_size - 1, math.ceil(problem.M_shard / comm_rows),
    )  # fmt: skip
    free = [0.0] * machine.sms  # a heap
    made: list[tuple[_Place, float]] = []
    for place in remote:
        end = free[0] + tile_us + around_us + area(tile) * machine.slower_us
        heapq.heapreplace(free, end)
        made.append((place, end))
    tile_bytes = tile.block_m * tile.block_n * ELEMENT_BYTES[problem.dtype]
    arrived = (_stored if by_sm else _pushed)(made, tile_bytes, machine)
    late = len(local) <= machine.sms
    for comm_tile in local:
        arrivals = [arrived[_Place(hops, comm_tile)] for hops in range(problem.world_size - 1)]
        end = _summed_us(free[0], tile_us, arrivals, late) + around_us
        heapq.heapreplace(free, end)
    return max(free)


@lru_cache(maxsize=256)
def _order(
    rows: int, columns: int, group_m: int, peers: int, comm_tiles: int
) -> tuple[list[_Place], list[int]]:
    """The tiles of the remote shards, and the communication tiles of the local ones, in the
    kernel's order: down in groups of rows, which span the remote shards.
    """
    in_shard = in_groups(rows, columns, min(group_m, rows))
    numbers = {at: number for number, at in enumerate(in_shard)}
    tiles_comm = math.ceil(rows * columns / min(COMM_TILES_MAX, comm_tiles))
    remote = [
        _Place(row // rows, numbers[row % rows, column] // tiles_comm)
        for row, column in in_groups(peers * rows, columns, group_m)
    ]
    return remote, [number // tiles_comm for number in range(rows * columns)]


def _pushed(
    made: Iterable[tuple[_Place, float]], tile_bytes: int, machine: _Machine
) -> dict[_Place, float]:
    """When each communication tile has come, by one copy engine, which takes them in the order in
    which their last tiles are made.
    """
    ready: dict[_Place, tuple[float, int]] = {}  # and its tiles
    for place, end in made:
        ready[place] = end, ready.pop(place, (0.0, 0))[1] + 1
    arrived, now = {}, machine.pushes_begin_us
    for place, (end, tiles) in ready.items():
        sending = tiles * tile_bytes / machine.copy_gbps * 1e-3
        now = max(now, end) + sending + PUSH_SHARE * machine.copy_latency_us
        arrived[place] = now + (1 - PUSH_SHARE) * machine.copy_latency_us
    return arrived


def _stored(
    made: Iterable[tuple[_Place, float]], tile_bytes: int, machine: _Machine
) -> dict[_Place, float]:
    """The same by stores of the SMs, tile after tile on the link."""
    arrived, now = {}, machine.pushes_begin_us
    for place, end in made:
        now = max(now, end) + tile_bytes / machine.copy_gbps * 1e-3
        arrived[place] = now + machine.signal_us
    return arrived


def _summed_us(begin: float, tile_us: float, arrivals: list[float], late: bool) -> float:
    """When a local tile that begins then is multiplied, and all peers' tiles are added to it: each
    behind its share of the main loop, or all behind the loop (`late`).
    """
    now = begin + tile_us * late
    for arrival in arrivals:
        now = max(now + tile_us * (not late) / len(arrivals), arrival)
        now += FETCH_US if late else ADD_US
    return now
