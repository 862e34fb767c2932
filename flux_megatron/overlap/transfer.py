"""The two directions in which overlapped calls move data, over one workspace.

`Gather`: every rank's rows into this rank's buffer, pushed by their owners' copy engines.
`Scatter`: every rank's partial results into this rank's slots, then their sum. A strategy starts
one, runs its GEMM beside it, and ends it; each holds its channel from start to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron import settings
from flux_megatron.kernels.meet_ranks import meet_ranks
from flux_megatron.kernels.reduce_slots import reduce_slots
from flux_megatron.kernels.wait_sources import wait_sources
from flux_megatron.overlap import wait_log
from flux_megatron.overlap.phase import phase
from flux_megatron.symm.channel import Call, Channel, Part
from flux_megatron.symm.copy_engine import CopyEngine, Push
from flux_megatron.symm.signals import as_int32, comm_rows_at_least, slot
from flux_megatron.symm.workspace import Workspace

# the channels of a workspace
GATHER, SCATTER, WORDS = "gather", "scatter", "words"


def timeout_ns() -> int:
    """The bound of a kernel's waits."""
    return int(settings.get().timeout_s * 1e9)


def begin(
    workspace: Workspace, channel: str, size_bytes: int, kind: type[Channel] = Channel
) -> Call:
    """Open a call with `size_bytes` in its part, behind all that calls have enqueued; a captured
    one behind all other ranks' having come to it.
    """
    workspace.engine.follow()
    call = workspace.begin(channel, size_bytes, kind)
    if call.part.entries is not None:
        meet_ranks(
            pad=call.pads[call.rank],
            pad_pointers=call.pad_pointers,
            entries=call.part.entries,
            status=call.status,
            rank=call.rank,
            world_size=call.world_size,
            timeout_ns=timeout_ns(),
        )
    return call


class Route(NamedTuple):
    """Where the rows of a gather go: the same for every call of a shape through one part."""

    pushes: tuple[Push, ...]
    gathered: Tensor
    own_rows: int
    comm_rows: int


def _route(part: Part, shape: torch.Size, dtype: torch.dtype, comm_rows: int) -> Route:
    """For x [M_shard, K] in communication tiles of `comm_rows` rows.

    Rank r is served first by rank r+1, whose rows it needs first: nobody's memory is written by all
    at once.
    """
    M_shard, K = shape
    row_bytes = K * dtype.itemsize
    comm_rows = comm_rows_at_least(M_shard, comm_rows)
    all_rows = (part.world_size, M_shard, K)
    pushes = []
    for step in range(1, part.world_size):
        peer = (part.rank - step) % part.world_size
        rows = part.view(peer, all_rows, dtype)[part.rank].data_ptr()
        for comm_tile, first in enumerate(range(0, M_shard, comm_rows)):
            count = min(comm_rows, M_shard - first)
            signal = part.pads[peer][slot(part.rank, comm_tile) :].data_ptr()  # signal [A]
            offset = first * row_bytes
            pushes.append(Push(rows + offset, offset, count * row_bytes, signal))
    gathered = part.view(part.rank, all_rows, dtype)
    own_rows = gathered[part.rank].data_ptr()
    return Route(tuple(pushes), gathered.flatten(0, 1), own_rows, comm_rows)


@dataclass
class Gather:
    """x [M_shard, K] of every rank on its way to `gathered` [M, K]."""

    workspace: Workspace
    call: Call
    x: Tensor
    gathered: Tensor
    comm_rows: int
    engine: CopyEngine
    own_rows: int = 0  # the address that `complete` has to copy them to, if it has to
    behind_pushes: bool = False  # by the engine
    joined: bool = False

    def wait_for(self, first_source: int, count: int = 1) -> None:
        """Order the current stream after the rows of `count` ranks from `first_source` on,
        around the ring.
        """
        self.engine.follow()
        with phase("wait"):
            wait_sources(
                pad=self.call.pads[self.call.rank],
                status=self.call.status,
                first_source=first_source,
                count=count,
                world_size=self.call.world_size,
                epoch=as_int32(self.call.epoch),
                timeout_ns=timeout_ns(),
                M_shard=self.x.shape[0],
                comm_rows=self.comm_rows,
            )

    def complete(self) -> Tensor:
        """All rows, ready on the current stream; valid until `close`."""
        self.engine.follow()
        if self.own_rows:
            copy = self.engine.copy if self.behind_pushes else self.engine.copy_here
            with phase("own rows"):
                copy(self.own_rows, self.x.data_ptr(), self.x.nbytes)
        if self.behind_pushes:
            self._join()
        self.wait_for(self.call.rank + 1, self.call.world_size - 1)
        return self.gathered

    def close(self) -> None:
        """Everything that reads the gathered rows has been enqueued."""
        self.engine.follow()
        if not self.joined:
            self._join()
        self.workspace.end(self.call)

    def _join(self) -> None:
        """What the current stream holds from now on comes after all pushes of this call."""
        self.engine.join()
        self.joined = True


def start_gather(
    x: Tensor, workspace: Workspace, comm_rows: int, *, own_rows: str = "later"
) -> Gather:
    """Push x to every peer, in communication tiles of `comm_rows` rows, each followed by its signal
    [A].

    `own_rows` says who copies x to the own rows in `complete`: "engine", behind the pushes;
    "later", the caller's stream; or "nobody". A copy within one GPU needs multiprocessors, so what
    a full-grid kernel waits for must never be pushed behind one: "engine" is for calls whose pushes
    are complete with it. Nor may it be enqueued before the caller's GEMMs: where
    CUDA_DEVICE_MAX_CONNECTIONS is 1 all streams share a queue, in which they would wait for the
    copy, and it for all pushes.
    """
    engine = workspace.engine
    call = begin(workspace, GATHER, workspace.world_size * x.nbytes)
    route: Route = call.part.prepared(_route, x.shape, x.dtype, comm_rows)
    with phase("gather push"):
        engine.fork()
        engine.send(route.pushes, x.data_ptr(), call.epoch)
    address = 0 if own_rows == "nobody" else route.own_rows
    return Gather(
        workspace, call, x, route.gathered, route.comm_rows, engine, address, own_rows == "engine"
    )


@dataclass(frozen=True)
class Scatter:
    """Partial results on their way to their owners: each writes slot `rank` [M_shard, N] of every
    owner's buffer.

    `keep_alive` is what the copy engine reads, None where it has no part in the call.
    """

    workspace: Workspace
    call: Call
    slots: Tensor
    comm_rows: int
    keep_alive: object = None

    def finish(self) -> Tensor:
        """y [M_shard, N]: the fp32 sum of this rank's slots in rank order, when all have come."""
        engine = self.workspace.engine
        engine.follow()
        with phase("reduce"):
            y = reduce_slots(
                self.slots,
                pad=self.call.pads[self.call.rank],
                status=self.call.status,
                epoch=as_int32(self.call.epoch),
                timeout_ns=timeout_ns(),
                comm_rows=self.comm_rows,
                waits=wait_log.next_buffer("reduce_slots", self.slots.device),
            )
        if self.keep_alive is not None:
            engine.join()
        self.workspace.end(self.call)
        return y
