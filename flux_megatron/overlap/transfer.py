"""The two directions in which overlapped calls move data, over one workspace.

`Gather`: every rank's rows into this rank's buffer, pushed by their owners' copy engines.
`Scatter`: every rank's partial results into this rank's slots, then their sum. A strategy starts
one, runs its GEMM beside it, and ends it; each holds its channel from start to end.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flux_megatron import settings
from flux_megatron.kernels.reduce_slots import reduce_slots
from flux_megatron.kernels.wait_sources import wait_sources
from flux_megatron.symm.copy_engine import copy_engine
from flux_megatron.symm.signals import as_int32, comm_rows_at_least, slot
from flux_megatron.symm.workspace import Call, Workspace


def timeout_ns() -> int:
    """The bound of a kernel's waits."""
    return int(settings.get().timeout_s * 1e9)


@dataclass(frozen=True)
class Gather:
    """x [M_shard, K] of every rank on its way to `gathered` [M, K]; the own rows come only if
    asked for.
    """

    workspace: Workspace
    call: Call
    x: Tensor
    gathered: Tensor
    comm_rows: int

    def wait_for(self, first_source: int, count: int = 1) -> None:
        """Order the current stream after the rows of `count` ranks from `first_source` on,
        around the ring.
        """
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
        """All rows, ready on the current stream; valid until `close`.

        Needs `start_gather(own_rows=True)`.
        """
        copy_engine(self.x.device).join()
        self.wait_for(self.call.rank + 1, self.call.world_size - 1)
        return self.gathered

    def close(self) -> None:
        """Everything that reads the gathered rows has been enqueued."""
        copy_engine(self.x.device).join()
        self.workspace.gather.end(self.call)


def start_gather(x: Tensor, workspace: Workspace, comm_rows: int, own_rows: bool) -> Gather:
    """Push x to every peer, in communication tiles of `comm_rows` rows, each followed by its signal
    [A].

    Rank r is served first by rank r+1, whose rows it needs first: nobody's memory is written by all
    at once.
    """
    engine = copy_engine(x.device)
    world_size, M_shard = workspace.group.size(), x.shape[0]
    comm_rows = comm_rows_at_least(M_shard, comm_rows)
    call = workspace.gather.begin(world_size * x.numel() * x.element_size())
    shape = (world_size, *x.shape)
    engine.fork()
    for step in range(1, world_size):
        peer = (call.rank - step) % world_size
        rows = call.view(peer, shape, x.dtype)[call.rank]
        for comm_tile, first in enumerate(range(0, M_shard, comm_rows)):
            part = slice(first, first + comm_rows)
            engine.push(rows[part], x[part])
            engine.signal(call.pads[peer], slot(call.rank, comm_tile), call.epoch)  # signal [A]
    gathered = call.view(call.rank, shape, x.dtype)
    if own_rows:
        engine.push(gathered[call.rank], x)
    return Gather(workspace, call, x, gathered.flatten(0, 1), comm_rows)


@dataclass(frozen=True)
class Scatter:
    """Partial results on their way to their owners: each writes slot `rank` [M_shard, N] of every
    owner's buffer.
    """

    workspace: Workspace
    call: Call
    slots: Tensor
    comm_rows: int
    keep_alive: object = None

    def finish(self) -> Tensor:
        """y [M_shard, N]: the fp32 sum of this rank's slots in rank order, when all have come."""
        y = reduce_slots(
            self.slots,
            pad=self.call.pads[self.call.rank],
            status=self.call.status,
            epoch=as_int32(self.call.epoch),
            timeout_ns=timeout_ns(),
            comm_rows=self.comm_rows,
        )
        copy_engine(y.device).join()
        self.workspace.scatter.end(self.call)
        return y
