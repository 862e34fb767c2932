"""The fused strategy for Hopper GPUs: FLUX's tiles at the speed of a library GEMM.

It differs from `fused` in who moves tiles. Large problems leave it to the copy engine, because
stores of the SMs into a peer's memory disturb the GEMM; small ones let a spare warp of the kernel
do it, because a copy engine takes 10 us to begin (`Plan.transport`).

The kernels' own files are imported when they are called: they need Gluon, which older versions of
Triton lack, as `supports` says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels import hopper_gemm
from flux_megatron.kernels.hopper_config import LOW
from flux_megatron.kernels.hopper_gemm import COMM_TILES_MAX
from flux_megatron.kernels.sizes import cdiv, part_columns, tiles_of_shard
from flux_megatron.kernels.triton_launch import empty
from flux_megatron.kernels.wait_sources import wait_sources
from flux_megatron.overlap import hopper_plans, transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.scaling import Scaling, result_dtype
from flux_megatron.symm.channel import Call, Region
from flux_megatron.symm.copy_engine import GatedPush, Push
from flux_megatron.symm.recording import lend
from flux_megatron.symm.signals import MAX_COMM_TILES, as_int32, slot_bytes
from flux_megatron.symm.workspace import Workspace

if TYPE_CHECKING:
    from flux_megatron.kernels.hopper_gemm_rs import Gathering


PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = True
RECORDABLE = (COLUMN, ROW)
default_plan, candidates = hopper_plans.default_plan, hopper_plans.candidates


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    if not 1 < problem.world_size <= COMM_TILES_MAX:
        return f"{problem.world_size} ranks given, 2 to {COMM_TILES_MAX} expected"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1: the kernel would wait for pushes that come after its launch"
    return transfer.unequal_shards(problem) or hopper_gemm.supports(problem)


def compile_plan(problem: Problem, plan: Plan, device: torch.device) -> None:
    """Compile the kernel of such calls, or find it in Triton's cache on disk."""
    from flux_megatron.kernels import hopper_probe

    hopper_probe.compile_for(problem, plan, device)


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None, scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows while they are valid."""
    from flux_megatron.kernels import hopper_ag_gemm

    comm_rows = plan.comm_rows and max(plan.comm_rows, cdiv(x.shape[0], COMM_TILES_MAX))
    k_parts = max(1, min(plan.splits, COMM_TILES_MAX))
    tile = plan.tile
    if tile.block_m > x.shape[0]:  # a tile lies within a shard
        tile = replace(LOW[0], block_k=tile.block_k)
    columns = part_columns(x.shape[1], k_parts, tile.block_k) if k_parts > 1 else 0
    gather = transfer.start_gather(
        x, workspace, comm_rows, local_copy="nobody", part_columns=columns
    )
    call = gather.call
    with phase("ag_gemm kernel"):
        y = hopper_ag_gemm.ag_gemm(
            x, gather.gathered, w, bias,
            pad=call.pads[call.rank], status=call.status,
            partial_counters=call.channel.partial_counters,
            work_words=call.channel.work_counter, rank=call.rank,
            epoch=as_int32(call.epoch), timeout_ns=call.timeout_ns,
            comm_rows=gather.comm_rows, layout=layout, tile=tile,
            copy_local=consume is not None, k_parts=k_parts, scaling=scaling,
        )  # fmt: skip
    if consume is not None:
        lend(consume, gather.complete())
    gather.close(by_kernel=True)
    return y


class PushSchedule(NamedTuple):
    received: Tensor
    tiles_comm: int
    pushes: tuple[GatedPush, ...]


def _schedule(
    region: Region,
    counters: int,
    M_shard: int,
    N: int,
    dtype: torch.dtype,
    comm_rows: int,
    tile: Tile,
) -> PushSchedule:
    tiles = tiles_of_shard(M_shard, N, tile)
    wanted = min(COMM_TILES_MAX, cdiv(M_shard, comm_rows) if comm_rows else 1)
    tiles_comm = cdiv(tiles, wanted)
    shape = (region.world_size * tiles * tile.block_m, tile.block_n)
    tile_bytes = tile.block_m * tile.block_n * dtype.itemsize

    def gated_push(hops: int, comm_tile: int) -> GatedPush:
        owner = (region.rank + 1 + hops) % region.world_size
        first = comm_tile * tiles_comm
        count = min(tiles_comm, tiles - first)
        push = Push(
            destination=region.addresses[owner] + (region.rank * tiles + first) * tile_bytes,
            offset=(hops * tiles + first) * tile_bytes,
            size_bytes=count * tile_bytes,
            signal=region.pad_addresses[owner] + slot_bytes(region.rank, comm_tile),  # signal [B]
        )
        return GatedPush(counters + 4 * (owner * MAX_COMM_TILES + comm_tile), count, push)

    def made_at(which: tuple[int, int]) -> int:
        hops, comm_tile = which
        last = min((comm_tile + 1) * tiles_comm, tiles) - 1
        return hopper_gemm.made_at(hops, last, M_shard, N, region.world_size, tile)

    # the last tile of one tells when it is ready: the order costs time, never the result
    all_of_them = itertools.product(range(region.world_size - 1), range(cdiv(tiles, tiles_comm)))
    pushes = tuple(gated_push(*which) for which in sorted(all_of_them, key=made_at))
    return PushSchedule(region.view(region.rank, shape, dtype), tiles_comm, pushes)


@dataclass(frozen=True)
class Scatter:
    """A scatter whose sum is part of its kernel."""

    workspace: Workspace
    call: Call
    y: Tensor
    parts: Tensor | None  # what the copy engine reads, if it has a part in the call
    tiles_comm: int

    def finish(self) -> Tensor:
        """y [M_shard, N]."""
        engine = self.workspace.engine
        engine.follow()
        if self.parts is not None:
            engine.join()
        self.workspace.end(self.call)
        return self.y


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
    scaling: Scaling | None = None,
) -> Scatter:  # fmt: skip
    """x @ w, tiles sent on as they are made; `finish` gives y [M_shard, N]."""
    return _start(x, w, layout, plan, workspace, scaling=scaling)


def _start(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
    gathering: Gathering | None = None, scaling: Scaling | None = None,
) -> Scatter:  # fmt: skip
    from flux_megatron.kernels import hopper_gemm_rs

    engine = workspace.engine
    world_size = workspace.world_size
    M_shard, N = x.shape[0] // world_size, w.shape[0] if layout == "nt" else w.shape[1]
    tile, by_sm = plan.tile, plan.transport == "sm"
    tile_rows = tiles_of_shard(M_shard, N, tile) * tile.block_m
    dtype = result_dtype(x, scaling)
    size_bytes = world_size * tile_rows * tile.block_n * dtype.itemsize
    call = transfer.begin(workspace, transfer.SCATTER, size_bytes)
    counters = call.channel.tile_counters
    schedule = _schedule(call.region, counters.data_ptr(), M_shard, N, dtype, plan.comm_rows, tile)
    parts = None
    if not by_sm:
        parts = empty(x, (world_size - 1) * tile_rows, tile.block_n, dtype=dtype)
        engine.fork()  # before the kernel: what is pushed waits for tiles, not for its end
    with phase("gemm_rs kernel"):
        y = hopper_gemm_rs.gemm_rs(
            x, w, parts=schedule.received if parts is None else parts, received=schedule.received,
            received_pointers=call.pointers, pad_pointers=call.pad_pointers,
            pad=call.pads[call.rank], status=call.status,
            counters=counters, partial_counters=call.channel.partial_counters,
            work_words=call.channel.work_counter, rank=call.rank,
            world_size=world_size, epoch=as_int32(call.epoch), timeout_ns=call.timeout_ns,
            tiles_comm=schedule.tiles_comm, layout=layout, tile=tile,
            by_sm=by_sm, gathering=gathering, scaling=scaling,
        )  # fmt: skip
    if parts is not None:
        with phase("scatter push"):
            engine.push_gated(schedule.pushes, parts.data_ptr(), call.epoch)
    return Scatter(workspace, call, y, parts, schedule.tiles_comm)


@dataclass(frozen=True)
class AllReduce:
    """A scatter whose kernel stores its sums at every rank: what is left is to copy theirs."""

    scatter: Scatter
    call: Call
    y: Tensor
    tiles: int
    tiles_comm: int

    def finish(self) -> Tensor:
        """y [M, N]."""
        self.scatter.finish()
        call, rank = self.call, self.call.rank
        with phase("wait"):
            wait_sources(
                pad=call.pads[rank], status=call.status,
                first_source=rank + 1, count=call.world_size - 1, world_size=call.world_size,
                epoch=as_int32(call.epoch), timeout_ns=call.timeout_ns,
                M_shard=self.tiles, comm_rows=self.tiles_comm,
            )  # fmt: skip
        gathered = call.view(rank, self.y.shape, self.y.dtype)
        before = rank * self.scatter.y.shape[0]
        behind = before + self.scatter.y.shape[0]
        with phase("copy"):
            for rows in (slice(before), slice(behind, None)):
                self.y[rows].copy_(gathered[rows])
        self.scatter.workspace.end(call)
        return self.y


def start_gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> AllReduce:
    """x @ w, summed as above, each sum stored at every rank; `finish` gives y [M, N]."""
    from flux_megatron.kernels.hopper_gemm_rs import Gathering

    M, N = x.shape[0], w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(M, N)
    call = transfer.begin(workspace, transfer.GATHER, y.nbytes)
    local = y.view(call.world_size, -1, N)[call.rank]
    gathering = Gathering(local, call.pointers, call.pad_pointers, as_int32(call.epoch))
    scatter = _start(x, w, layout, plan, workspace, gathering)
    tiles = tiles_of_shard(len(local), N, plan.tile)
    return AllReduce(scatter, call, y, tiles, scatter.tiles_comm)
