"""One direction in which calls move data: a symmetric buffer, signals, and the number of the call.

An eager call uses one half of the buffer, by the parity of its epoch, and meets nobody when it
begins. A call that is captured in a CUDA graph has a third part and signals of its own: whatever a
replay repeats, the number of its call included, is the same each time, so it begins by meeting the
other ranks. `docs/memory_model.md` has both arguments. They rest on one open call a channel, which
`begin` and `end` enforce.

`Workspace` makes the channels, begins and ends their calls, and lets all ranks meet before one
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.symm import device as devices
from flux_megatron.symm import signals
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.status import Status

_PARTS = 3  # two halves for eager calls, by parity, then the part of captured calls
_CAPTURED = 2
_MAX_PREPARED = 1024
REFRESH_EVERY = 2**30  # calls: epochs are compared over 2**31


@dataclass(frozen=True, eq=False)
class Part:
    """What one call at a time uses: a part of each rank's buffer, and the signals that go with it.

    `pointers` and `pad_pointers` are int64 [R] on the device. `entries`, int32 [1], is this rank's
    count of captured calls, None in the parts of eager calls.
    """

    rank: int
    world_size: int
    size_bytes: int
    pointers: Tensor
    pads: tuple[Tensor, ...]
    pad_pointers: Tensor
    entries: Tensor | None
    _data: SymmetricBuffer
    _offset_bytes: int
    _prepared: dict[Hashable, Any] = field(default_factory=dict)

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank `rank`'s part as a tensor."""
        return self._data.view(rank, shape, dtype, self._offset_bytes)

    def prepared(self, make: Callable[..., Any], *arguments: Hashable) -> Any:
        """`make(part, *arguments)`, kept for later calls: the addresses of a part do not change."""
        key = (make, arguments)
        if key not in self._prepared:
            if len(self._prepared) >= _MAX_PREPARED:  # shapes that change from step to step
                self._prepared.clear()
            self._prepared[key] = make(self, *arguments)
        return self._prepared[key]


class Call(NamedTuple):
    """One use of a channel. `epoch` is what its signals announce."""

    epoch: int
    status: Tensor
    part: Part
    channel: Channel

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def world_size(self) -> int:
        return self.part.world_size

    @property
    def pointers(self) -> Tensor:
        return self.part.pointers

    @property
    def pads(self) -> tuple[Tensor, ...]:
        return self.part.pads

    @property
    def pad_pointers(self) -> Tensor:
        return self.part.pad_pointers

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank `rank`'s part of this call as a tensor."""
        return self.part.view(rank, shape, dtype)


class Channel:
    """A symmetric buffer in three parts, with signals, and the epoch of the last eager call.

    Waits that run out of time are recorded in `status`. Collective constructor.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, status: Status) -> None:
        self._group, self._device, self._status = group, device, status
        self._rank, self._world_size = group.rank(), group.size()
        self._pad_bytes = signals.pad_words(self._world_size) * torch.int32.itemsize
        self._pad_buffer = devices.allocate(2 * self._pad_bytes, group, device)
        self._pads, self._captured_pads = (self._pads_at(n * self._pad_bytes) for n in range(2))
        slots = self._world_size * signals.MAX_COMM_TILES
        self.tile_counters = torch.zeros(slots, dtype=torch.int32, device=device)
        self.part_counters = torch.zeros(signals.PART_COUNTERS, dtype=torch.int32, device=device)
        self.work_counter = torch.zeros(signals.WORK_WORDS, dtype=torch.int32, device=device)
        self._entries = torch.zeros(1, dtype=torch.int32, device=device)
        waiter = f"rank {self._rank} of group {group.group_name}"
        awaited = partial(signals.told, world_size=self._world_size)
        for pads in (self._pads, self._captured_pads):
            status.name(pads[self._rank], waiter, awaited)
        status.name(self.part_counters, waiter, "the partials of tile {}".format)
        self.epoch = 0
        self.open = False  # whether a call is
        self.part_bytes = 0
        self._parts: tuple[Part, ...] = ()
        self._captured = False  # whether a graph knows the addresses of these parts
        self._outgrown: list[tuple[Part, ...]] = []  # graphs replay into the memory they know

    @property
    def size_bytes(self) -> int:
        held = [self._parts, *self._outgrown] if self._parts else []
        return sum(_PARTS * parts[0].size_bytes for parts in held)

    def begin(self, captured: bool) -> Call:
        """Open the next call."""
        assert not self.open, "a channel has one open call"
        self.open = True
        if captured:
            self._captured = True
            return Call(signals.CAPTURED_EPOCH, self._status.words, self._parts[_CAPTURED], self)
        self.epoch += 1
        return Call(self.epoch, self._status.words, self._parts[self.epoch % 2], self)

    def end(self, call: Call) -> None:
        """Close the call: all that reads its part has been enqueued on the current stream."""
        captured = call.part is self._parts[_CAPTURED]
        assert self.open and (captured or call.epoch == self.epoch), "calls are closed in order"
        if settings.get().poison:
            # No peer writes this part before our next call, by its data or its entry, tells it that
            # we are done here.
            call.view(call.rank, (call.part.size_bytes,), torch.uint8).fill_(0xFF)
        self.open = False

    def grow(self, size_bytes: int) -> None:
        """Take new parts of so many bytes, when no rank uses the old ones any more. Collective."""
        if self._captured:
            self._outgrown.append(self._parts)
            self._captured = False
        aligned = -(-size_bytes // 4096) * 4096
        data = devices.allocate(_PARTS * aligned, self._group, self._device)
        self._parts = tuple(self._part(data, aligned, index) for index in range(_PARTS))
        self.part_bytes = aligned

    def refresh(self) -> None:
        """Let slots that small calls leave alone announce the last call, as those in use do: a slot
        of 2**31 calls ago would be taken for one to come.

        Between the last signal of the calls so far and the first of the next one.
        """
        self._pads[self._rank].fill_(signals.as_int32(self.epoch))

    def _pads_at(self, offset_bytes: int) -> tuple[Tensor, ...]:
        shape = (signals.pad_words(self._world_size),)
        return tuple(
            self._pad_buffer.view(rank, shape, torch.int32, offset_bytes)
            for rank in range(self._world_size)
        )

    def _part(self, data: SymmetricBuffer, size_bytes: int, index: int) -> Part:
        captured = index == _CAPTURED
        return Part(
            rank=self._rank,
            world_size=self._world_size,
            size_bytes=size_bytes,
            pointers=data.pointers + index * size_bytes,
            pads=self._captured_pads if captured else self._pads,
            pad_pointers=self._pad_buffer.pointers + captured * self._pad_bytes,
            entries=self._entries if captured else None,
            _data=data,
            _offset_bytes=index * size_bytes,
        )
