"""Memory that calls travel through: one workspace a group, shared by all layers, growing to the
largest call.

A workspace has one `Channel` a direction. A channel alternates between two halves. That needs no
barrier: a rank enters call e only after it has received from every peer in call e-1, and a peer
sends in call e-1 only after it has finished call e-2, the last user of the half that call e writes.
The rule this rests on, one open call a channel, is enforced by `begin` and `end`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm import buffer, signals
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.call_log import CallLog


@dataclass(frozen=True)
class Call:
    """One use of a channel.

    `pointers` and `pad_pointers` are int64 [R]: this half, and the signals, of each rank.
    """

    epoch: int
    rank: int
    world_size: int
    pointers: Tensor
    pad_pointers: Tensor
    pads: tuple[Tensor, ...]
    status: Tensor
    _data: SymmetricBuffer
    _offset_bytes: int

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank `rank`'s half of this call as a tensor."""
        return self._data.view(rank, shape, dtype, self._offset_bytes)


class Channel:
    """A symmetric buffer of two halves with a pad of signals and the epoch of the last call."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, explain: Callable[[], str]
    ) -> None:
        self._group, self._device, self._explain = group, device, explain
        world_size = group.size()
        slots = world_size * signals.MAX_COMM_TILES
        pad_bytes = slots * torch.int32.itemsize
        self._pad_buffer = buffer.allocate(pad_bytes, group, device)
        self._pads = tuple(
            self._pad_buffer.view(r, (slots,), torch.int32) for r in range(world_size)
        )
        # kernels write it, the host reads it without a synchronisation
        self._status = torch.zeros(
            signals.STATUS_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.tile_counters = torch.zeros(slots, dtype=torch.int32, device=device)
        self.epoch = 0
        self._open = False
        self._half_bytes = 0
        self._data: SymmetricBuffer | None = None
        self._pointers: tuple[Tensor, Tensor] | None = None
        self._last_stream: torch.cuda.Stream | None = None

    @property
    def size_bytes(self) -> int:
        return self._data.size_bytes if self._data is not None else 0

    def begin(self, size_bytes: int) -> Call:
        """Open the next call with `size_bytes` in a half.

        Grows, collectively, when that is too small.
        """
        self._refuse_capture()
        self.check()
        if self._open:
            raise errors.WorkspaceError(
                "a call was begun on this channel while another was open, or after one that failed"
            )
        if self._data is None or size_bytes > self._half_bytes:
            self._grow(size_bytes)
        assert self._data is not None and self._pointers is not None, "grown above"
        self._follow_last_stream()
        self.epoch += 1
        self._open = True
        half = self.epoch % 2
        return Call(
            epoch=self.epoch,
            rank=self._group.rank(),
            world_size=self._group.size(),
            pointers=self._pointers[half],
            pad_pointers=self._pad_buffer.pointers,
            pads=self._pads,
            status=self._status,
            _data=self._data,
            _offset_bytes=half * self._half_bytes,
        )

    def end(self, call: Call) -> None:
        """Close the call: all that reads its half has been enqueued on the current stream."""
        assert self._open and call.epoch == self.epoch, "calls of a channel are closed in order"
        if settings.get().poison:
            # No peer writes this half before our next call's data tells it that we are done here.
            call.view(call.rank, (self._half_bytes,), torch.uint8).fill_(0xFF)
        if self._device.type == "cuda":
            self._last_stream = torch.cuda.current_stream(self._device.index)
        self._open = False
        if self._device.type == "cpu":  # kernels have returned: what they met is known
            self.check()

    def check(self) -> None:
        """Raise `SignalTimeout` if a kernel's wait has run out of time since."""
        tripped, slot, expected, seen = self._status.tolist()
        if not tripped:
            return
        source, comm_tile = divmod(slot, signals.MAX_COMM_TILES)
        reason = self._explain()
        raise errors.SignalTimeout(
            f"rank {self._group.rank()} of group {self._group.group_name} waited "
            f"{settings.get().timeout_s:g} s for communication tile {comm_tile} of rank {source}: "
            f"epoch {expected} expected, {seen} seen" + (f" ({reason})" if reason else "")
        )

    def _refuse_capture(self) -> None:
        # a replay would repeat the epoch, find its signals raised already, and read too early
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise errors.WorkspaceError(
                "overlapped calls cannot be captured in a CUDA graph: the number of the call would "
                "be captured too. Set FLUX_MEGATRON_STRATEGY=sequential for captured regions"
            )

    def _follow_last_stream(self) -> None:
        if self._last_stream is None:
            return
        current = torch.cuda.current_stream(self._device.index)
        if current != self._last_stream:
            current.wait_stream(self._last_stream)

    def _grow(self, size_bytes: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier(group=self._group)  # no rank uses the old memory any more
        aligned = -(-size_bytes // 4096) * 4096
        self._data = buffer.allocate(2 * aligned, self._group, self._device)
        self._half_bytes = aligned
        first = self._data.pointers
        self._pointers = (first, first + aligned)


class Workspace:
    """What one group shares: the agreement, a channel for gathers and one for scatters."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.agreement = Agreement(group)
        self.decisions: dict[Hashable, Any] = {}  # what callers have settled with all ranks
        self.unavailable = _why_unavailable(group, device)
        self.calls = None if self.unavailable else _call_log(group, device)
        if self.unavailable is None:
            self.gather = Channel(group, device, self._explain)
            self.scatter = Channel(group, device, self._explain)

    def note(self, words: str) -> None:
        """Record a call by its description; `ProblemMismatch` if a rank is seen to differ."""
        if self.calls is not None:
            self.calls.note(words)

    def _explain(self) -> str:
        """The likely reason for a signal that did not come."""
        difference = self.calls.difference() if self.calls is not None else ""
        return self.agreement.refusals() or difference

    @property
    def size_bytes(self) -> int:
        """Symmetric memory held by this rank, in bytes."""
        return 0 if self.unavailable else self.gather.size_bytes + self.scatter.size_bytes


def _call_log(group: ProcessGroup, device: torch.device) -> CallLog | None:
    """The log of calls; on GPUs a group can do without, if its ranks share no host memory."""
    try:
        return CallLog(group)
    except errors.WorkspaceError:
        if device.type == "cpu":
            raise
        return None


def _why_unavailable(group: ProcessGroup, device: torch.device) -> str | None:
    places: list[tuple[str, str]] = [("", "")] * group.size()
    dist.all_gather_object(places, (device.type, socket.gethostname()), group=group)
    devices, hosts = ({place[i] for place in places} for i in (0, 1))
    if len(devices) > 1:
        said = ", ".join(f"rank {r}: {place[0]}" for r, place in enumerate(places))
        raise errors.ProblemMismatch(f"the ranks brought tensors on different devices ({said})")
    if len(hosts) > 1:
        return f"the group spans {len(hosts)} nodes, symmetric memory needs one"
    return None


_workspaces: dict[str, Workspace] = {}


def workspace(group: ProcessGroup, device: torch.device) -> Workspace:
    """The workspace of `group`. Collective at its first call."""
    found = _workspaces.get(group.group_name)
    if found is None or found.group is not group:  # names come back after destroy_process_group
        found = _workspaces[group.group_name] = Workspace(group, device)
    return found


def workspaces() -> list[Workspace]:
    """All workspaces of this process, for reports and checks."""
    return list(_workspaces.values())


def check() -> None:
    """Raise `SignalTimeout` if any call enqueued so far has missed a rank.

    On CUDA it speaks of kernels that have finished: call it after a synchronisation, before
    results are trusted. Every later call does it too.
    """
    for space in workspaces():
        if space.unavailable is None:
            space.gather.check()
            space.scatter.check()


def release() -> None:
    """Forget every workspace; their memory goes with the last tensor that uses it."""
    _workspaces.clear()
