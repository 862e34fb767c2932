"""The fused strategy for Hopper GPUs: FLUX's tiles at the speed of a library GEMM.

It differs from `fused` in who moves tiles. Large problems leave it to the copy engine, because
stores of the multiprocessors into a peer's memory disturb the products; small ones let spare warps
of the kernel do it, because a copy engine takes 10 us to begin (`Plan.transport`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels import hopper_gemm
from flux_megatron.kernels.hopper_gemm import COMM_TILES_MAX, TILE, tiles_of_shard
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import transfer, wait_log
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.channel import Call, Region
from flux_megatron.symm.copy_engine import GatedPush, Push
from flux_megatron.symm.signals import MAX_COMM_TILES, as_int32, slot
from flux_megatron.symm.workspace import Workspace

NARROW = replace(TILE, block_n=128, num_stages=5, group_m=16)
BY_SM_BYTES = 8 << 20  # that a rank sends to each peer; more goes by copy engine


PATTERNS = (COLUMN, ROW)
NEEDS_SYMMETRIC_MEMORY = True


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    if not 1 < problem.world_size <= COMM_TILES_MAX:
        return f"{problem.world_size} ranks given, 2 to {COMM_TILES_MAX} expected"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1: the kernel would wait for pushes that come after its launch"
    return hopper_gemm.supports(problem)


def default_plan(problem: Problem) -> Plan:
    """Large communication tiles, and groups of 16 rows of tiles."""
    if problem.spec.gathers:
        return Plan("hopper", tile=replace(TILE, group_m=16))
    small = problem.M_shard * problem.N_local * 2 <= BY_SM_BYTES
    # the SMs signal for nothing, a copy engine takes 10 us to begin each
    comm_tiles = COMM_TILES_MAX if small else 2
    return Plan(
        "hopper",
        comm_rows=cdiv(problem.M_shard, comm_tiles),
        tile=replace(TILE, group_m=16),
        transport="sm" if small else "copy_engine",
    )


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring."""
    default = default_plan(problem)
    plans = [replace(default, tile=tile) for tile in (replace(TILE, group_m=8), NARROW)]
    if problem.spec.scatters and problem.M_shard <= 512:
        plans += [
            replace(plan, transport=transport, comm_rows=cdiv(problem.M_shard, comm_tiles))
            for transport, comm_tiles in (("sm", COMM_TILES_MAX), ("copy_engine", 2))
            for plan in (default, *plans)
        ]
    return [*dict.fromkeys(plans + _with_cuts(problem, default))]


def _with_cuts(problem: Problem, default: Plan) -> list[Plan]:
    """Plans with early tiles cut along K, where there are any to cut."""
    if not hopper_gemm.cuts_of(problem, TILE, 1, torch.device("cuda")).early:
        return []
    if problem.spec.scatters:
        plain = [replace(default, transport="sm"), replace(default, tile=NARROW, transport="sm")]
        pushed = replace(default, transport="copy_engine", comm_rows=cdiv(problem.M_shard, 2))
        return [replace(plan, cut_shards=1) for plan in (*plain, pushed)]
    # groups within a shard: what comes from one rank never waits for another
    alone = replace(TILE, group_m=min(16, cdiv(problem.M_shard, TILE.block_m)))
    plans = [replace(default, tile=tile, cut_shards=1) for tile in (default.tile, alone, NARROW)]
    return [*plans, replace(default, tile=alone, cut_shards=problem.world_size)]


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows while they are valid."""
    comm_rows = plan.comm_rows and max(plan.comm_rows, cdiv(x.shape[0], COMM_TILES_MAX))
    gather = transfer.start_gather(x, workspace, comm_rows, local_copy="nobody")
    call = gather.call
    with phase("ag_gemm kernel"):
        y = hopper_gemm.ag_gemm(
            x, gather.gathered, w, bias,
            pad=call.pads[call.rank], status=call.status,
            part_counters=call.channel.partial_counters,
            work_counter=call.channel.work_counter, rank=call.rank,
            epoch=as_int32(call.epoch), timeout_ns=transfer.timeout_ns(),
            comm_rows=gather.comm_rows, layout=layout, tile=plan.tile,
            cut_shards=plan.cut_shards, copy_own=consume is not None,
            waits=wait_log.next_buffer("hopper_ag_gemm", x.device),
        )  # fmt: skip
    if consume is not None:
        consume(gather.complete())
    gather.close()
    return y


class Route(NamedTuple):
    """The same for every scatter of a shape through one part."""

    slots: Tensor
    tiles_comm: int
    deliveries: tuple[GatedPush, ...]


def _route(
    part: Region,
    counters: int,
    M_shard: int,
    N: int,
    dtype: torch.dtype,
    comm_rows: int,
    tile: Tile,
) -> Route:
    tiles = tiles_of_shard(M_shard, N, tile)
    wanted = min(COMM_TILES_MAX, cdiv(M_shard, comm_rows) if comm_rows else 1)
    tiles_comm = cdiv(tiles, wanted)
    shape = (part.world_size * tiles * tile.block_m, tile.block_n)
    tile_bytes = tile.block_m * tile.block_n * dtype.itemsize

    def delivery(step: int, comm_tile: int) -> GatedPush:
        owner = (part.rank + 1 + step) % part.world_size
        first = comm_tile * tiles_comm
        count = min(tiles_comm, tiles - first)
        slots = part.view(owner, shape, dtype).data_ptr()
        push = Push(
            destination=slots + (part.rank * tiles + first) * tile_bytes,
            offset=(step * tiles + first) * tile_bytes,
            size_bytes=count * tile_bytes,
            signal=part.pads[owner][slot(part.rank, comm_tile) :].data_ptr(),  # signal [B]
        )
        return GatedPush(counters + 4 * (owner * MAX_COMM_TILES + comm_tile), count, push)

    made = hopper_gemm.last_made(M_shard, N, part.world_size, tiles_comm, tile)
    deliveries = tuple(delivery(*which) for which in sorted(made, key=made.__getitem__))
    return Route(part.view(part.rank, shape, dtype), tiles_comm, deliveries)


@dataclass(frozen=True)
class Scatter:
    """A scatter whose sum is part of its kernel."""

    workspace: Workspace
    call: Call
    y: Tensor
    parts: Tensor | None  # what the copy engine reads, if it has a part in the call

    def finish(self) -> Tensor:
        """y [M_shard, N]."""
        engine = self.workspace.engine
        engine.follow()
        if self.parts is not None:
            engine.join()
        self.workspace.end(self.call)
        return self.y


def start_gemm_rs(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Scatter:
    """x @ w, tiles sent on as they are made; `finish` gives y [M_shard, N]."""
    engine = workspace.engine
    world_size = workspace.world_size
    M_shard, N = x.shape[0] // world_size, w.shape[0] if layout == "nt" else w.shape[1]
    tile, by_sm = plan.tile, plan.transport == "sm"
    tile_rows = tiles_of_shard(M_shard, N, tile) * tile.block_m
    size_bytes = world_size * tile_rows * tile.block_n * x.element_size()
    call = transfer.begin(workspace, transfer.SCATTER, size_bytes)
    counters = call.channel.tile_counters
    route: Route = call.region.prepared(
        _route, counters.data_ptr(), M_shard, N, x.dtype, plan.comm_rows, tile
    )
    parts = None
    if not by_sm:
        parts = x.new_empty((world_size - 1) * tile_rows, tile.block_n)
        engine.fork()  # before the kernel: what is pushed waits for tiles, not for its end
    with phase("gemm_rs kernel"):
        y = hopper_gemm.gemm_rs(
            x, w, parts=route.slots if parts is None else parts, slots=route.slots,
            slot_pointers=call.pointers, pad_pointers=call.pad_pointers,
            pad=call.pads[call.rank], status=call.status,
            counters=counters, part_counters=call.channel.partial_counters,
            work_counter=call.channel.work_counter, rank=call.rank,
            world_size=world_size, epoch=as_int32(call.epoch), timeout_ns=transfer.timeout_ns(),
            tiles_comm=route.tiles_comm, layout=layout, tile=tile,
            cut_shards=plan.cut_shards, by_sm=by_sm,
            waits=wait_log.next_buffer("hopper_gemm_rs", x.device),
        )  # fmt: skip
    if parts is not None:
        with phase("scatter push"):
            engine.push_gated(route.deliveries, parts.data_ptr(), call.epoch)
    return Scatter(workspace, call, y, parts)
