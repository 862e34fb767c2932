"""The gather of rows as steps of a program: the copy engine of every rank pushes its rows into this
rank's gathered buffer, and kernels or the caller's stream wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flux_megatron.kernels.portable.wait_sources import wait_sources
from flux_megatron.overlap import arrivals
from flux_megatron.overlap.transfer import BESIDE, GATHER, comm_tiles, tile_rows, waits
from flux_megatron.symm.enqueue import Operand, always
from flux_megatron.symm.program import CallProgram, ChannelSlots
from flux_megatron.symm.signals import comm_rows_at_least
from flux_megatron.symm.steps import Slot


@dataclass
class Gather:
    """x [M_shard, K] of every rank in flight to `gathered` [M, K]; its blockwise `scales`, if it
    has such, to `gathered_scales`, a matrix a rank. Who copies the local shard copies its scales.
    """

    program: CallProgram
    channel: ChannelSlots
    x: Slot
    gathered: Slot
    comm_rows: int
    comm_tiles: list[tuple[int, int]]  # as `transfer.comm_tiles` gives them
    of_columns: bool  # they are parts of the columns, each of all rows
    local_copy: str
    scales: Slot | None = None
    gathered_scales: Slot | None = None
    joined: bool = False
    brought: bool = False
    awaited: int = 1  # ranks whose signals this one has awaited; its own rows need none

    def wait_for(self, first_source: int, count: int = 1) -> None:
        """Order the current stream after the rows of `count` ranks from `first_source` on,
        around the ring. Each rank once.
        """
        self.bring()
        self.awaited += count
        with self.program.phase("wait"):
            wait_sources(
                **waits(self.channel),
                first_source=first_source,
                count=count,
                world_size=self.program.world_size,
                M_shard=len(self.comm_tiles),
                comm_rows=1,
            )

    def bring(self) -> None:
        """Have the rows come from the mailbox, if there is one: behind the kernel that runs beside
        it, and before the caller's stream waits for them.
        """
        if not self.brought and self.program.space.mailboxes:
            arrivals.bring(self.program, self._arriving())
        self.brought = True

    def _arriving(self) -> list[arrivals.Part]:
        """What peers push, in the order in which it comes."""
        p, x = self.program, self.x
        box = (len(x), x.shape[1] * x.element_size()) if self.of_columns else ()
        parts = []
        for step, number in _order(p.world_size, len(self.comm_tiles), self.of_columns):
            source, (offset, size_bytes) = (p.rank + step) % p.world_size, self.comm_tiles[number]
            blocks = [(source * x.nbytes + offset, size_bytes, *box)]
            if self.scales is not None and number == 0:
                scales = self.scales.nbytes
                blocks.append((p.world_size * x.nbytes + source * scales, scales))
            parts.append(arrivals.Part(self.channel.number, source, number, tuple(blocks)))
        return parts

    def scales_of(self, first: int, last: int) -> Slot | None:
        """The blockwise scales of the rows of the ranks from `first` to before `last`."""
        if self.scales is None or self.gathered_scales is None:
            return None
        blocks = len(self.scales)
        return self.gathered_scales[first * blocks : last * blocks]

    def complete(self) -> Slot:
        """All rows [M, K], for the current stream; borrowed until `close`."""
        p = self.program
        if self.local_copy != "nobody":
            own = self.channel.peer(p.rank, p.rank * self.x.nbytes)
            by = "copy" if self.local_copy == "engine" else "copy_here"
            with p.phase("local shard"):
                p.copy(own, self.x, by)
                if self.scales is not None:
                    own = _behind_rows(self.channel, p.rank, self.x, self.scales)
                    p.copy(own, self.scales, by)
        if self.local_copy == "engine":
            self._join()
        self.wait_for(p.rank + 1, p.world_size - 1)
        return self.gathered

    def close(self, *, by_kernel: bool = False) -> None:
        """End the gather; everything that reads the gathered rows has been enqueued.

        No rank ends a call before its stream has awaited every signal of it: by `complete`, by
        `wait_for`, or in a kernel (docs/memory_model.md, 2).
        """
        assert by_kernel or self.awaited >= self.program.world_size, "not all rows are awaited"
        if self.program.space.mailboxes:
            arrivals.end(self.program)
        if not self.joined:
            self._join()
        self.program.held += (self.x,) if self.scales is None else (self.x, self.scales)

    def _join(self) -> None:
        """Order later work of the current stream after all pushes of this call."""
        self.program.move("join")
        self.joined = True


def add_gather(
    p: CallProgram, x: Slot, comm_rows: int, *, local_copy: str = "caller", part_columns: int = 0,
    scales: Slot | None = None, channel_name: str = GATHER,
) -> Gather:  # fmt: skip
    """Push x to every peer, in communication tiles of `comm_rows` rows, each followed by its signal
    [A]; or all rows in parts of so many columns. `scales` are the blockwise ones of x.

    `local_copy` names who copies x to the local shard of the gathered rows in `complete`: "engine",
    behind the pushes; "caller", the caller's stream; or "nobody". A copy within one GPU needs SMs,
    so no push that a full-grid kernel waits for may stand behind one: "engine" is for calls that
    enqueue no push after it. The copy may not stand before the caller's GEMMs either. With
    CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share a queue: the GEMMs would wait for the copy, and
    the copy for all pushes.
    """
    scale_bytes = 0 if scales is None else scales.nbytes
    channel = p.channel(channel_name, p.world_size * (x.nbytes + scale_bytes))
    comm_rows = comm_rows_at_least(len(x), tile_rows(p, len(x), comm_rows))
    pitch, part_bytes = x.shape[1] * x.element_size(), part_columns * x.element_size()
    tiles, of_columns = [*comm_tiles(len(x), pitch, comm_rows, part_bytes)], part_columns > 0
    with p.phase("gather push"):
        p.move("fork")
        _push_shard(channel, x, tiles, of_columns, scales)
    gathered = channel.region((p.world_size * len(x), x.shape[1]), x.dtype)
    gathered_scales = None
    if scales is not None:
        shape = p.world_size * len(scales), scales.shape[1]
        gathered_scales = channel.region(shape, scales.dtype, gathered.nbytes)
    return Gather(
        p, channel, x, gathered, comm_rows, tiles, of_columns, local_copy, scales, gathered_scales
    )  # fmt: skip


def gather_rows(p: CallProgram, channel_name: str = GATHER) -> None:
    """x of every rank for the caller, who enqueues while it is in flight, then borrows it, and
    the scales last, if x has any.
    """
    scales: Any = p.scaling.x if p.scaling else None
    gather = add_gather(p, p.x, p.plan.comm_rows, scales=scales, channel_name=channel_name)
    p.caller_step()
    p.caller_step(gather.complete())
    if scales is not None:
        p.caller_step(gather.gathered_scales)
    gather.close()


def gather_beside(p: CallProgram) -> None:
    """As `gather_rows`, beside other calls."""
    gather_rows(p, BESIDE)


def _push_shard(
    channel: ChannelSlots, x: Slot, tiles: list[tuple[int, int]], of_columns: bool,
    scales: Slot | None,
) -> None:  # fmt: skip
    """Push x [M_shard, K] in these communication tiles, each followed by its signal [A].

    Rank r+1 pushes to rank r first, which needs these rows first. So the ranks never all write to
    one rank at once. Of parts of K every rank gets the first before any gets the second. All
    blockwise `scales` of x go before the first signal: they are a 32nd of its bytes.
    """
    p, pitch = channel.program, x.shape[1] * x.element_size()
    for step, number in _order(p.world_size, len(tiles), of_columns):
        peer = (p.rank - step) % p.world_size
        offset, size_bytes = tiles[number]
        to = channel.peer(peer, p.rank * x.nbytes + offset)
        given = to, x.operand.plus(offset), always(size_bytes)
        if scales is not None and number == 0:
            p.copy(_behind_rows(channel, peer, x, scales), scales)
        if of_columns:
            p.move("copy_rows", *given, always(len(x)), always(pitch))
        else:
            p.move("copy", *given)
        p.move("signal", channel.signal(peer, p.rank, number), channel.epoch)  # signal [A]


def _order(world_size: int, tiles: int, of_columns: bool) -> list[tuple[int, int]]:
    """How far the peer of each push is, and the number of its communication tile."""
    pairs = [(step, number) for step in range(1, world_size) for number in range(tiles)]
    return sorted(pairs, key=lambda pair: pair[1]) if of_columns else pairs


def _behind_rows(channel: ChannelSlots, rank: int, x: Slot, scales: Slot) -> Operand:
    """Where this rank's scales lie in the region of a rank."""
    p = channel.program
    return channel.peer(rank, p.world_size * x.nbytes + p.rank * scales.nbytes)


def all_reduced(p: CallProgram, sums: Slot) -> Slot:
    """y [M, N] of the sums [M_shard, N] that every rank has formed after a scatter.

    Copy engines move them behind what the caller enqueues in the caller step, such as wgrad.
    """
    gather = add_gather(p, sums, 0)
    p.caller_step()
    gathered = gather.complete()
    y = sums.new_empty(*gathered.shape)
    p.torch(Tensor.copy_, y, gathered)
    gather.close()
    return y
