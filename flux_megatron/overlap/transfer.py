"""How calls begin, and the sum of partial results that every rank has sent to the owners of rows.

`overlap.gather` is the other direction. A strategy starts one, adds its GEMM beside it and ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flux_megatron.kernels.portable.reduce_received import reduce_received
from flux_megatron.kernels.portable.wait_sources import wait_sources
from flux_megatron.kernels.rank_barrier import rank_barrier
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import arrivals
from flux_megatron.problem import COMM_TILES_MAX, Problem
from flux_megatron.symm import copies
from flux_megatron.symm.channel import Call, Channel
from flux_megatron.symm.program import CallProgram, ChannelSlots
from flux_megatron.symm.steps import Slot
from flux_megatron.symm.workspace import Workspace

# the channels of a workspace
GATHER, SCATTER, WORDS, BESIDE = "gather", "scatter", "words", "rows beside"


def unequal_shards(problem: Problem) -> str | None:
    """Why the rows cannot be scattered, or None: every rank sums equally many."""
    if problem.M % problem.world_size:
        return f"{problem.M} rows cannot be divided over {problem.world_size} ranks"
    return None


def tile_rows(p: CallProgram, rows: int, comm_rows: int) -> int:
    """Of a communication tile. Where a plan leaves it open and there are mailboxes, an eighth of
    the rows: the second copy of a tile begins when the first has ended.
    """
    return comm_rows or (cdiv(rows, COMM_TILES_MAX) if p.space.mailboxes else 0)


def begin(
    workspace: Workspace, channel: str, size_bytes: int, kind: type[Channel] = Channel
) -> Call:
    """Open a call with `size_bytes` in its region, behind all calls of the device before it. A
    captured call begins with a rank barrier.
    """
    workspace.engine.follow()
    call = workspace.begin(channel, size_bytes, kind)
    if call.region.entries is not None:
        rank_barrier(call)
        if workspace.mailboxes:
            arrivals.begin_captured(call)
    return call


def comm_tiles(
    M_shard: int, row_bytes: int, comm_rows: int, part_bytes: int
) -> Iterator[tuple[int, int]]:
    """Where each begins in the shard, and its bytes: all, or, of parts of K, those of a row."""
    if part_bytes:
        for first in range(0, row_bytes, part_bytes):
            yield first, min(part_bytes, row_bytes - first)
        return
    for row in range(0, M_shard, comm_rows):
        yield row * row_bytes, min(comm_rows, M_shard - row) * row_bytes


def waits(channel: ChannelSlots) -> dict[str, Any]:
    """What a kernel needs that waits for signals of a call."""
    return {
        "pad": channel.fixed("pad"), "status": channel.fixed("status"), "epoch": channel.epoch,
        "timeout_ns": channel.program.timeout_ns,
    }  # fmt: skip


@dataclass(frozen=True)
class ReduceScatter:
    """Partial results in flight to the owners of their rows: each rank writes block `rank`
    [M_shard, N] of every owner's receive buffer.

    `received` [R, M_shard, N] is this rank's receive buffer. `staging` is what the copy engine
    reads, None if it copies nothing.
    """

    channel: ChannelSlots
    received: Slot
    comm_rows: int
    staging: Slot | None = None

    def finish(self) -> Slot:
        """y [M_shard, N]: the fp32 sum of the received blocks in rank order."""
        p, M_shard = self.channel.program, self.received.shape[1]
        boxes = p.space.mailboxes
        if boxes:
            arrivals.bring(p, self._arriving())
        if self.staging is not None and (boxes or copies.spare_sms(p.x.device)):
            # One CTA waits, for those of the reduction may hold all SMs; also for this rank, whose
            # signal stands behind its pushes. With mailboxes a reduction that waits itself lasts 5
            # to 87 ms (2 x H200, 210642fd, h200x2/machines.jsonl).
            wait_sources(
                **waits(self.channel), first_source=p.rank + 1, count=p.world_size,
                world_size=p.world_size, M_shard=M_shard, comm_rows=self.comm_rows,
            )  # fmt: skip
        with p.phase("reduce"):
            y = reduce_received(self.received, **waits(self.channel), comm_rows=self.comm_rows)
        if self.staging is not None:
            p.move("join")
            p.held += (self.staging,)
        if boxes:
            arrivals.end(p)
        return y

    def _arriving(self) -> list[arrivals.Part]:
        """What peers push, in the order in which it comes."""
        p, (_, M_shard, N) = self.channel.program, self.received.shape
        row_bytes, parts = N * self.received.element_size(), []
        tiles = [*comm_tiles(M_shard, row_bytes, self.comm_rows, 0)]
        for source in ((p.rank - hops) % p.world_size for hops in range(1, p.world_size)):
            for number, (offset, size_bytes) in enumerate(tiles):
                block = source * M_shard * row_bytes + offset, size_bytes
                parts.append(arrivals.Part(self.channel.number, source, number, (block,)))
        return parts
