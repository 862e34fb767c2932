"""One direction in which calls move data: a symmetric buffer, signals, and the number of the call.

An eager call uses one half of the buffer, by the parity of its epoch, and meets nobody when it
begins. A call that is captured in a CUDA graph has a third part and signals of its own: whatever a
replay repeats, the number of its call included, is the same each time, so it begins by meeting the
other ranks. `docs/memory_model.md` has both arguments. They rest on one open call a channel, which
`begin` and `end` enforce.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm import buffer, signals
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.status import Status
from flux_megatron.symm.stream_order import stream_order

_PARTS = 3  # two halves for eager calls, by parity, then the part of captured calls
_CAPTURED = 2
_MAX_PREPARED = 1024
REFRESH_EVERY = 2**30  # calls: epochs are compared over 2**31


def capturing(device: torch.device) -> bool:
    """Whether what is enqueued now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class Part:
    """What one call at a time uses: a part of each rank's buffer, and the signals that go with it.

    `pointers` and `pad_pointers` are int64 [R] on the device.
    """

    rank: int
    world_size: int
    size_bytes: int
    pointers: Tensor
    pads: tuple[Tensor, ...]
    pad_pointers: Tensor
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

    Waits that run out of time are recorded in `status`; `check` raises what has come of them.
    `enter` launches the kernel with which a captured call begins; it gets the call and this rank's
    count of such calls, int32 [1].
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, status: Status,
        check: Callable[[], None], enter: Callable[[Call, Tensor], None],
    ) -> None:  # fmt: skip
        self._group, self._device = group, device
        self._rank, self._world_size = group.rank(), group.size()
        self._status, self._check, self._enter = status, check, enter
        self._order = stream_order(device)
        self._pad_bytes = signals.pad_words(self._world_size) * torch.int32.itemsize
        self._pad_buffer = buffer.allocate(2 * self._pad_bytes, group, device)
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
        self._parts: tuple[Part, ...] = ()
        self._captured = False  # whether a graph knows the addresses of these parts
        self._outgrown: list[tuple[Part, ...]] = []  # graphs replay into the memory they know

    @property
    def size_bytes(self) -> int:
        held = [self._parts, *self._outgrown] if self._parts else []
        return sum(_PARTS * parts[0].size_bytes for parts in held)

    def begin(self, size_bytes: int) -> Call:
        """Open the next call with `size_bytes` in its part.

        Grows, collectively, when that is too small; `WorkspaceError` if that would be in a capture.
        """
        self._check()
        if self.open:
            raise errors.WorkspaceError("a call was begun on this channel while another was open")
        captured = capturing(self._device)
        if not self._parts or size_bytes > self._parts[0].size_bytes:
            self._grow(size_bytes, captured)
        if not captured and (self.epoch + 1) % REFRESH_EVERY == 0:
            self._refresh()
        self.follow()
        self.open = True
        if captured:
            self._captured = True
            call = self._call(signals.CAPTURED_EPOCH, self._parts[_CAPTURED])
            self._enter(call, self._entries)
            return call
        self.epoch += 1
        return self._call(self.epoch, self._parts[self.epoch % 2])

    def _call(self, epoch: int, part: Part) -> Call:
        return Call(epoch, self._status.words, part)

    def follow(self) -> None:
        """Go on with an open call, after whatever calls of this device have enqueued since."""
        self._order.follow()

    def end(self, call: Call) -> None:
        """Close the call: all that reads its part has been enqueued on the current stream."""
        captured = call.part is self._parts[_CAPTURED]
        assert self.open and (captured or call.epoch == self.epoch), "calls are closed in order"
        self.follow()
        if settings.get().poison:
            # No peer writes this part before our next call, by its data or its entry, tells it that
            # we are done here.
            call.view(call.rank, (call.part.size_bytes,), torch.uint8).fill_(0xFF)
        self.open = False
        if self._device.type == "cpu":  # kernels have returned: what they met is known
            self._check()

    def _grow(self, size_bytes: int, captured: bool) -> None:
        if captured:
            raise errors.WorkspaceError(
                f"a captured call needs {size_bytes} bytes of symmetric memory, "
                f"{self._parts[0].size_bytes if self._parts else 0} are there, and memory cannot "
                "be had during capture: make the same call once before it is captured"
            )
        self._meet()  # no rank uses the old memory any more
        if self._captured:
            self._outgrown.append(self._parts)
            self._captured = False
        aligned = -(-size_bytes // 4096) * 4096
        data = buffer.allocate(_PARTS * aligned, self._group, self._device)
        self._parts = tuple(self._part(data, aligned, index) for index in range(_PARTS))

    def _refresh(self) -> None:
        """Let slots that small calls leave alone announce the last call, as those in use do.

        A slot of 2**31 calls ago would be taken for one to come.
        """
        self._meet()  # all signals of the calls so far have come
        self._pads[self._rank].fill_(signals.as_int32(self.epoch))
        self._meet()  # none of the next call comes before

    def _meet(self) -> None:
        """No rank goes on before all have finished what they have enqueued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._check()  # the others may be gone
        dist.barrier(group=self._group)

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
            _data=data,
            _offset_bytes=index * size_bytes,
        )
