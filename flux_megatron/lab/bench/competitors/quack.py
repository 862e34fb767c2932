"""quack: AG+GEMM, a GEMM in CuTe DSL whose loads wait for the arrivals of its all-gather.

As in its own benchmark, tiles are the caller's choice. It gets the fastest of TILES on each case.
Read with quack-kernels 0.6.5: `AllGatherRunner` makes symmetric buffers and flags of torch's own
symmetric memory, pushes shards by the copy engine, and has neither a reduce-scatter nor a backward.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module, util
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.symm import objects
from flux_megatron.tuning.timing import race

ROUNDS = 3  # of the race that chooses a tile
RUNNER = "quack.distributed"
FREE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Tile(NamedTuple):
    """The output tile of a CTA, how many of them a cluster has along M, and the schedule of its
    two MMA warpgroups: on tiles in turn (ping-pong), or on one.
    """

    M: int
    N: int
    cluster_M: int
    pingpong: bool

    @property
    def rows(self) -> int:
        """A shard is a multiple of them: no cluster may need two shards."""
        return self.M * self.cluster_M


# its benchmark's, its library's default, both without clusters, and one for small shards
TILES = (
    Tile(128, 256, 2, False), Tile(128, 192, 2, True), Tile(128, 256, 1, False),
    Tile(128, 192, 1, True), Tile(64, 192, 1, True),
)  # fmt: skip


class Quack:
    """AG+GEMM. Its runner has buffers of one shape: a change of M or of K makes a new one."""

    name = "quack"

    def __init__(self) -> None:
        self._shape: tuple[int, int, torch.dtype] | None = None
        self._runner: Any = None

    def unavailable(self) -> str | None:
        if util.find_spec("quack") is None:
            return "quack-kernels is not installed"
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
            return "needs GPUs of compute capability 9.0 or later"
        try:
            import_module(RUNNER)
        except Exception as error:  # an older version has none; another fails in many ways
            return f"{RUNNER} cannot be imported: {type(error).__name__}: {error}"
        if os.environ.get(FREE) != "1":
            return f"{FREE}=1 expected: without it torch makes multicast objects for its buffers"
        return None

    def build(self, experiment: Forward | Backward) -> dict[str, Call]:
        assert isinstance(experiment, Forward), "has a candidate for AG+GEMM only"
        rows = experiment.x.shape[0]
        fitting = [tile for tile in TILES if rows % tile.rows == 0]
        if not fitting:
            least = min(tile.rows for tile in TILES)
            raise ValueError(f"shards of {rows} rows given, a multiple of {least} expected")
        self._prepare(experiment)
        calls = {tile: partial(self._call, experiment, tile) for tile in fitting}
        return {self.name: _fastest(calls, experiment, _arrived(experiment))}

    def _prepare(self, e: Forward) -> None:
        shape = (*e.x.shape, e.x.dtype)
        if shape == self._shape:
            return
        if self._runner is not None:  # peers write into its buffers
            if e.device.type == "cuda":
                torch.cuda.synchronize(e.device)
            dist.barrier(group=e.group)
        self._shape = self._runner = None
        runner = import_module(RUNNER).AllGatherRunner
        self._runner = runner(*shape, group=e.group, device=e.device)
        self._shape = shape

    def _call(self, e: Forward, tile: Tile) -> tuple[Tensor]:
        with self._runner.gather(e.x) as (gathered, arrivals):
            return (gemm(gathered, e.right, tile, arrivals),)


def gemm(x: Tensor, right: Tensor, tile: Tile, arrivals: Any = None) -> Tensor:
    """x @ right; quack takes the right operand as [N, K], in either order of its strides."""
    y = x.new_empty(x.shape[0], right.shape[1])
    import_module("quack.gemm").gemm(
        x, right.t(), y, None, None, tile_M=tile.M, tile_N=tile.N, cluster_M=tile.cluster_M,
        cluster_N=1, pingpong=tile.pingpong, ag_args=arrivals,
    )  # fmt: skip
    return y


def _arrived(e: Forward) -> Any:
    """Gates that are open: the epoch that they wait for is the one that their flags have."""
    epochs = torch.zeros(1 + e.group.size(), dtype=torch.int32, device=e.device)
    arguments = import_module("quack.gemm").AllGatherArguments
    return arguments(epochs[1:], epochs[:1], e.group.size(), e.group.rank())


def _fastest(calls: Mapping[Tile, Call], e: Forward, arrivals: Any) -> Call:
    """The call of the tile that wins a race. Collective.

    Every tile first runs on its own with open gates, which compiles it: its gates have no time
    limit, so a rank that cannot compile would leave the others waiting for ever.
    """
    failing = objects.all_gather({tile: _failure(e, tile, arrivals) for tile in calls}, e.group)
    usable = {str(tile): call for tile, call in calls.items() if not any(f[tile] for f in failing)}
    raced = race(usable, group=e.group, device=e.device, rounds=ROUNDS)
    if not raced.times_us:
        said = {reason for of_rank in failing for reason in of_rank.values() if reason}
        raise RuntimeError("; ".join(sorted(said | {*raced.failures.values()})))
    return usable[min(raced.times_us, key=raced.median_us)]


def _failure(e: Forward, tile: Tile, arrivals: Any) -> str:
    try:
        gemm(e.gathered, e.right, tile, arrivals)
        if e.device.type == "cuda":
            torch.cuda.synchronize(e.device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
