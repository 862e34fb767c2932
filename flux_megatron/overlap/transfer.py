"""The two directions in which overlapped calls move data, over one workspace.

`Gather`: the copy engine of every rank pushes its rows into this rank's gathered buffer.
`ReduceScatter`: every rank's partial results go into this rank's receive buffer, then their sum is
formed. `AllReduce`: the gather after such a scatter. A strategy starts one, runs its GEMM beside
it, and ends it. Each holds its channel from start to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels.rank_barrier import rank_barrier
from flux_megatron.kernels.reduce_received import reduce_received
from flux_megatron.kernels.wait_sources import wait_sources
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Problem
from flux_megatron.symm.channel import Call, Channel, Region
from flux_megatron.symm.copy_engine import CopyEngine, Push
from flux_megatron.symm.signals import as_int32, comm_rows_at_least, slot_bytes
from flux_megatron.symm.workspace import Workspace

# the channels of a workspace
GATHER, SCATTER, WORDS = "gather", "scatter", "words"


def unequal_shards(problem: Problem) -> str | None:
    """Why the rows cannot be scattered, or None: every rank sums equally many."""
    if problem.M % problem.world_size:
        return f"{problem.M} rows cannot be divided over {problem.world_size} ranks"
    return None


def begin(
    workspace: Workspace, channel: str, size_bytes: int, kind: type[Channel] = Channel
) -> Call:
    """Open a call with `size_bytes` in its region, behind everything that earlier calls have
    enqueued. A captured call begins with a rank barrier.
    """
    workspace.engine.follow()
    call = workspace.begin(channel, size_bytes, kind)
    if call.region.entries is not None:
        rank_barrier(
            pad=call.pads[call.rank],
            pad_pointers=call.pad_pointers,
            entries=call.region.entries,
            status=call.status,
            rank=call.rank,
            world_size=call.world_size,
            timeout_ns=call.timeout_ns,
        )
    return call


class PushSchedule(NamedTuple):
    """The pushes of a gather.

    `gathered` is this rank's buffer [M, K], `local_shard` the address of its own rows there. A
    shard has `comm_tiles` communication tiles.
    """

    pushes: tuple[Push, ...]
    gathered: Tensor
    local_shard: int
    comm_rows: int
    comm_tiles: int


def _push_schedule(
    region: Region, shape: torch.Size, dtype: torch.dtype, comm_rows: int, part_columns: int = 0
) -> PushSchedule:
    """For x [M_shard, K] in communication tiles of `comm_rows` rows, or, if not 0, of
    `part_columns` columns of all rows.

    Rank r+1 pushes to rank r first, which needs these rows first. So the ranks never all write to
    one rank at once. Of parts of K every rank gets the first before any gets the second.
    """
    rank, (M_shard, K) = region.rank, shape
    row_bytes = K * dtype.itemsize
    comm_rows = comm_rows_at_least(M_shard, comm_rows)
    tiles = _comm_tiles(M_shard, row_bytes, comm_rows, part_columns * dtype.itemsize)
    shard_bytes, pushes = rank * M_shard * row_bytes, []
    for step in range(1, region.world_size):
        peer = (rank - step) % region.world_size
        shard = region.addresses[peer] + shard_bytes
        for comm_tile, (offset, size_bytes, *rows) in enumerate(tiles):
            signal = region.pad_addresses[peer] + slot_bytes(rank, comm_tile)  # signal [A]
            pushes.append(Push(shard + offset, offset, size_bytes, signal, *rows))
    if part_columns:
        pushes.sort(key=lambda push: push.offset)
    gathered = region.view(rank, (region.world_size * M_shard, K), dtype)
    local_shard = region.addresses[rank] + shard_bytes
    return PushSchedule(tuple(pushes), gathered, local_shard, comm_rows, len(tiles))


def _comm_tiles(
    M_shard: int, row_bytes: int, comm_rows: int, part_bytes: int
) -> list[tuple[int, int, int, int]]:
    """As a push has them: the offset, the bytes, of how many rows each, and the pitch of those."""
    if part_bytes:
        return [
            (first, min(part_bytes, row_bytes - first), M_shard, row_bytes)
            for first in range(0, row_bytes, part_bytes)
        ]
    return [
        (first * row_bytes, min(comm_rows, M_shard - first) * row_bytes, 1, 0)
        for first in range(0, M_shard, comm_rows)
    ]


@dataclass
class Gather:
    """x [M_shard, K] of every rank in flight to `gathered` [M, K]."""

    workspace: Workspace
    call: Call
    x: Tensor
    gathered: Tensor
    comm_rows: int
    comm_tiles: int
    engine: CopyEngine
    local_shard: int = 0  # the address that `complete` copies x to, 0 if it copies nothing
    behind_pushes: bool = False  # the copy engine copies, not the caller's stream
    joined: bool = False
    awaited: int = 1  # ranks whose signals this one has awaited; its own rows need none

    def wait_for(self, first_source: int, count: int = 1) -> None:
        """Order the current stream after the rows of `count` ranks from `first_source` on,
        around the ring. Each rank once.
        """
        self.engine.follow()
        self.awaited += count
        with phase("wait"):
            wait_sources(
                pad=self.call.pads[self.call.rank],
                status=self.call.status,
                first_source=first_source,
                count=count,
                world_size=self.call.world_size,
                epoch=as_int32(self.call.epoch),
                timeout_ns=self.call.timeout_ns,
                M_shard=self.comm_tiles,
                comm_rows=1,
            )

    def complete(self) -> Tensor:
        """All rows [M, K], for the current stream; borrowed until `close`."""
        self.engine.follow()
        if self.local_shard:
            copy = self.engine.copy if self.behind_pushes else self.engine.copy_here
            with phase("local shard"):
                copy(self.local_shard, self.x.data_ptr(), self.x.nbytes)
        if self.behind_pushes:
            self._join()
        self.wait_for(self.call.rank + 1, self.call.world_size - 1)
        return self.gathered

    def close(self, *, by_kernel: bool = False) -> None:
        """End the call; everything that reads the gathered rows has been enqueued.

        No rank ends a call before its stream has awaited every signal of it: by `complete`, by
        `wait_for`, or in a kernel. Who asked for no rows waits here (docs/memory_model.md, 2).
        """
        self.engine.follow()
        if not by_kernel and self.awaited < self.call.world_size:
            self.wait_for(self.call.rank + 1, self.call.world_size - 1)
        if not self.joined:
            self._join()
        self.engine.hold(self.x)
        self.workspace.end(self.call)

    def _join(self) -> None:
        """Order later work of the current stream after all pushes of this call."""
        self.engine.join()
        self.joined = True


def start_gather(
    x: Tensor, workspace: Workspace, comm_rows: int, *, local_copy: str = "caller",
    part_columns: int = 0,
) -> Gather:  # fmt: skip
    """Push x to every peer, in communication tiles of `comm_rows` rows, each followed by its signal
    [A]; or all rows in parts of so many columns.

    `local_copy` names who copies x to the local shard of the gathered rows in `complete`: "engine",
    behind the pushes; "caller", the caller's stream; or "nobody". A copy within one GPU needs SMs,
    so no push that a full-grid kernel waits for may stand behind one: "engine" is for calls that
    enqueue no push after it. The copy may not stand before the caller's GEMMs either. With
    CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share a queue: the GEMMs would wait for the copy, and
    the copy for all pushes.
    """
    engine = workspace.engine
    call = begin(workspace, GATHER, workspace.world_size * x.nbytes)
    schedule = _push_schedule(call.region, x.shape, x.dtype, comm_rows, part_columns)
    with phase("gather push"):
        engine.fork()
        engine.send(schedule.pushes, x.data_ptr(), call.epoch)
    return Gather(
        workspace, call, x, schedule.gathered, schedule.comm_rows, schedule.comm_tiles, engine,
        local_shard=0 if local_copy == "nobody" else schedule.local_shard,
        behind_pushes=local_copy == "engine",
    )  # fmt: skip


@dataclass(frozen=True)
class ReduceScatter:
    """Partial results in flight to the owners of their rows: each rank writes block `rank`
    [M_shard, N] of every owner's receive buffer.

    `received` [R, M_shard, N] is this rank's receive buffer. `keep_alive` is what the copy engine
    reads, None if it copies nothing.
    """

    workspace: Workspace
    call: Call
    received: Tensor
    comm_rows: int
    keep_alive: Tensor | None = None

    def finish(self) -> Tensor:
        """y [M_shard, N]: the fp32 sum of the received blocks in rank order."""
        engine = self.workspace.engine
        engine.follow()
        with phase("reduce"):
            y = reduce_received(
                self.received,
                pad=self.call.pads[self.call.rank],
                status=self.call.status,
                epoch=as_int32(self.call.epoch),
                timeout_ns=self.call.timeout_ns,
                comm_rows=self.comm_rows,
            )
        if self.keep_alive is not None:
            engine.join()
            engine.hold(self.keep_alive)
        self.workspace.end(self.call)
        return y


@dataclass(frozen=True)
class AllReduce:
    """The gather of the sums [M_shard, N] that every rank has formed after a scatter.

    Copy engines move it behind what the caller enqueues before `finish`, such as wgrad.
    """

    gather: Gather

    def finish(self) -> Tensor:
        """y [M, N]."""
        gathered = self.gather.complete()  # the workspace's
        y = torch.empty_like(gathered).copy_(gathered)
        self.gather.close()
        return y
