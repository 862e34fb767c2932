"""One direction in which calls move data: a symmetric buffer, signals, and the number of the call.

The buffer has two regions. Eager calls alternate between them, by the parity of their epoch, and
begin without a barrier. A call that a CUDA graph captures has a region and signals of its own. A
replay repeats everything, the number of its call included, so it begins with a rank barrier. A
capture cannot allocate: the first captured call takes a region of eager calls for all that follow,
and the next eager call replaces it. `docs/memory_model.md` has both arguments. They need one open
call a channel, which `begin` and `end` enforce.

`Workspace` makes the channels, begins and ends their calls, and calls a barrier before one grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.symm import device as devices
from flux_megatron.symm import mailbox_watch, signals
from flux_megatron.symm.buffer import Region, SymmetricBuffer
from flux_megatron.symm.groups import name_of
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.lru_cache import LRUCache
from flux_megatron.symm.status import Status

REFRESH_EVERY = 2**30  # calls: epochs are compared over 2**31
_PAGE = 4096


def rounded(size_bytes: int) -> int:
    """The size of a region for `size_bytes`: a multiple of an eighth of the power of two below it,
    and of whole pages. So a channel grows at most eight times until its size doubles.
    """
    step = max(_PAGE, 1 << (size_bytes.bit_length() - 1) >> 3)
    return -(-size_bytes // step) * step


class Call(NamedTuple):
    """One use of a channel. `epoch` is what its signals announce."""

    epoch: int
    status: Tensor
    region: Region
    channel: Channel

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What kernels read of other ranks, their regions and pads, and write to; and the status
        record.
        """
        region = self.region
        return region.pointers, region.pads[region.rank], region.pad_pointers, self.status

    @property
    def numbers(self) -> tuple[int, int, int]:
        """This rank, the epoch as kernels compare it, and the bound of their waits in ns."""
        return self.region.rank, signals.as_int32(self.epoch), self.channel.timeout_ns


class Channel:
    """A symmetric buffer in regions, its signals, and the epoch of the last eager call.

    `status` records waits that run out of time; `mailboxes` says that other ranks write into such.
    Collective constructor.
    """

    # the tensors of a region that kernels take: their places in `Region.fixed`, and their types
    FIXED: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        "pointers": (0, torch.int64), "pad_pointers": (1, torch.int64), "pad": (2, torch.int32),
        "status": (3, torch.int32), "tile_counters": (4, torch.int32),
        "partial_counters": (5, torch.int32), "work_counter": (6, torch.int32),
    }  # fmt: skip

    def __init__(
        self, group: ProcessGroup, device: torch.device, status: Status, mailboxes: bool = False
    ) -> None:
        self._group, self._device, self._status = group, device, status
        self._mailboxes = mailboxes
        self._rank, self._world_size = group.rank(), group.size()
        self._named: list[Tensor] = []
        self._pad_bytes = signals.pad_words(self._world_size) * torch.int32.itemsize
        self._pad_buffer = devices.allocate(2 * self._pad_bytes, group, device, mailboxes)
        self._pads, self._captured_pads = (self._pads_at(n * self._pad_bytes) for n in range(2))
        self._captured_pad_pointers = self._pad_buffer.pointers + self._pad_bytes
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self.tile_counters = zeros(self._world_size * signals.MAX_COMM_TILES)
        self.partial_counters = zeros(signals.PARTIAL_COUNTERS)
        self.work_counter = zeros(signals.WORK_WORDS)
        self._entries = zeros(1)
        awaited = partial(signals.describe_slot, world_size=self._world_size)
        self._awaited: mailbox_watch.Awaited | None = None
        if mailboxes:
            words = signals.pad_words(self._world_size)
            self._awaited = mailbox_watch.Awaited(self._rank, self._pad_buffer, words, status)
            mailbox_watch.watch(self._awaited)
        own = [self._own_pad(first) for first in (0, self._pad_bytes)] if mailboxes else []
        for pad in (self._pads[self._rank], self._captured_pads[self._rank], *own):
            self._name(pad, awaited)
        self._name(self.partial_counters, "the partials of tile {}".format)
        self.epoch = 0
        self.open = False  # whether a call is
        self.region_bytes = 0
        self._regions: tuple[Region, ...] = ()
        self._captured: Region | None = None  # of captured calls, once there was one
        self._spare: Region | None = None  # of eager calls, when captured ones have taken the other
        self._outgrown: list[Region] = []  # that replays of older graphs write

    def _name(self, pad: Tensor, awaited: Callable[[int], str]) -> None:
        waiter = f"rank {self._rank} of group {name_of(self._group)}"
        self._status.name(pad, waiter, awaited, partial(self._status.bound_s, self._group))
        self._named.append(pad)

    def _forget(self, pad: Tensor) -> None:
        self._status.forget(pad)
        self._named = [one for one in self._named if one is not pad]

    @property
    def timeout_ns(self) -> int:
        """The bound of a kernel's waits."""
        return self._status.bound_ns(self._group)

    def close(self) -> None:
        """Nobody uses the channel any more: its waits lose their names."""
        for pad in self._named:
            self._forget(pad)
        if self._awaited is not None:
            mailbox_watch.forget(self._awaited)

    @property
    def held_by_graph(self) -> bool:
        """Whether a graph was captured that writes regions of ours."""
        return self._captured is not None or bool(self._outgrown)

    @property
    def size_bytes(self) -> int:
        held = (*self._regions, self._captured, self._spare, *self._outgrown)
        buffers = {id(one._data): one._data for one in held if one is not None}
        return sum(one.size_bytes for one in buffers.values())

    def room(self, captured: bool) -> int:
        """The bytes that the next call may have without growth."""
        return self._captured.size_bytes if captured and self._captured else self.region_bytes

    def may_begin(self, size_bytes: int) -> bool:
        """Whether the next eager call needs nothing before it: no end of another, no growth, no
        refresh.
        """
        if self.open or size_bytes > self.region_bytes:
            return False
        return (self.epoch + 1) % REFRESH_EVERY != 0

    def begin(self, captured: bool) -> Call:
        """Open the next call."""
        assert not self.open, "a channel has one open call"
        self.open = True
        if captured:
            region = self._captured or self._taken()
            return Call(signals.CAPTURED_EPOCH, self._status.words, region, self)
        self.epoch += 1
        return Call(self.epoch, self._status.words, self._regions[self.epoch % 2], self)

    def _taken(self) -> Region:
        """A region for captured calls. Nothing is made: that would go into the graph."""
        region, self._spare = self._regions
        pads, pad_pointers = self._captured_pads, self._captured_pad_pointers
        fixed = (region.pointers, pad_pointers, pads[self._rank], *region.fixed[3:])
        self._captured = replace(
            region, pads=pads, pad_pointers=pad_pointers, entries=self._entries, fixed=fixed,
            own_pad=self._own_pad(self._pad_bytes), _prepared=LRUCache(),
        )  # fmt: skip
        self._regions, self.region_bytes = (), 0
        return self._captured

    def take_back(self) -> None:
        """Close an eager call of which nothing has been enqueued."""
        self.epoch -= 1
        self.open = False

    def expect(self, epoch: int, slots: Sequence[int]) -> None:
        """A stream awaits these signals in the mailbox."""
        assert self._awaited is not None, "a channel without mailboxes"
        self._awaited.expect(epoch, slots, self._status.bound_s(self._group))

    def end(self, call: Call) -> None:
        """Close the call: all that reads its region has been enqueued on the current stream."""
        assert self.open, "a call is closed once"
        if settings.get().poison:
            self.poison(call.region)
        self.open = False

    @lasting()
    def poison(self, region: Region) -> None:
        """Fill the region of a call that ends. No peer writes it before our next call announces, by
        its data or its entry, that this one is done.
        """
        region.view(region.rank, (region.size_bytes,), torch.uint8).fill_(0xFF)

    def grow(self, size_bytes: int) -> None:
        """Allocate new regions of `size_bytes` or more, or the one that captured calls have taken;
        no rank uses the old ones any more. Collective.
        """
        size = rounded(size_bytes)
        spare, self._spare = self._spare, None
        if spare is not None and size <= spare.size_bytes:
            size = spare.size_bytes
        else:
            spare = None
            if self._captured is not None:
                self._outgrown.append(self._captured)
                self._captured = None
        wanted = size if spare else 2 * size
        data = devices.allocate(wanted, self._group, self._device, self._mailboxes)
        self._regions = self._new_region(data, size, 0), spare or self._new_region(data, size, 1)
        self.region_bytes = size

    @lasting()
    def refresh(self) -> None:
        """Set all slots to the last call, as those in use are: a slot that small calls have left
        alone for 2**31 calls would look like one to come.

        Call it after the last signal of the calls so far and before the first of the next one.
        """
        for pad in (self._pads[self._rank], self._own_pad(0)):
            pad.fill_(signals.as_int32(self.epoch))

    def _pads_at(self, offset_bytes: int) -> tuple[Tensor, ...]:
        shape = (signals.pad_words(self._world_size),)
        return tuple(
            self._pad_buffer.view(rank, shape, torch.int32, offset_bytes)
            for rank in range(self._world_size)
        )

    def _own_pad(self, offset_bytes: int) -> Tensor:
        """Where other ranks signal to this one."""
        return self._pad_buffer.own[offset_bytes:][: self._pad_bytes].view(torch.int32)

    def _counters(self) -> tuple[Tensor, ...]:
        return self.tile_counters, self.partial_counters, self.work_counter

    def _new_region(self, data: SymmetricBuffer, size_bytes: int, index: int) -> Region:
        pointers = data.pointers + index * size_bytes
        pad, pad_pointers = self._pads[self._rank], self._pad_buffer.pointers
        return Region(
            rank=self._rank,
            world_size=self._world_size,
            size_bytes=size_bytes,
            pointers=pointers,
            pads=self._pads,
            pad_pointers=pad_pointers,
            entries=None,
            own_pad=self._own_pad(0),
            fixed=(pointers, pad_pointers, pad, self._status.words, *self._counters()),
            _data=data,
            _offset_bytes=index * size_bytes,
        )
