"""What a group's calls travel through: one workspace a group, shared by all layers, growing to the
largest call.

A workspace hands out channels by name, made when a call first asks for one, and has the agreement
of its ranks and the log of their calls. After a failure in the middle of a call, or a wait that ran
out of time, it refuses all further calls, and tells the other ranks why.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import socket
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.call_log import CallLog
from flux_megatron.symm.channel import REFRESH_EVERY, Call, Channel
from flux_megatron.symm.device import copy_engine
from flux_megatron.symm.status import Status


def capturing(device: torch.device) -> bool:
    """Whether what is enqueued now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Workspace:
    """What one group shares: `channels` by name, the agreement, the log of calls, the device's copy
    engine.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, status: Status | None = None
    ) -> None:
        self.group, self.device, self.world_size = group, device, group.size()
        self.engine = copy_engine(device)
        self.agreement = Agreement(group)
        self.decisions: dict[Hashable, Any] = {}  # what callers have settled with all ranks
        self.checked: dict[Hashable, Any] = {}  # the same by all that a rank checks of its call
        self.settings: settings.Settings | None = None  # those that `checked` holds for
        self.unavailable = _why_unavailable(group, device)
        self.calls = None if self.unavailable else _call_log(group, device)
        self._late = ""  # the wait that ran out of time, and its likely reason
        self._status = status or Status(device)
        self.channels: dict[str, Channel] = {}

    def begin(self, channel: str, size_bytes: int) -> Call:
        """Open the next call of a channel, with `size_bytes` in its part.

        Makes the channel, or lets it grow, where that is too small: collective, and
        `WorkspaceError` if it would be in a capture.
        """
        self.check()
        captured = capturing(self.device)
        found = self.channels.get(channel)
        if found is not None and found.open:
            raise errors.WorkspaceError(f"a {channel} was begun while another was open")
        if found is None or size_bytes > found.part_bytes:
            found = self._enlarged(channel, size_bytes, captured)
        if not captured and (found.epoch + 1) % REFRESH_EVERY == 0:
            self._meet()  # all signals of the calls so far have come
            found.refresh()
            self._meet()  # none of the next call comes before
        return found.begin(captured)

    def end(self, call: Call) -> None:
        """Close the call: all that reads its part has been enqueued on the current stream."""
        call.channel.end(call)
        if self.device.type == "cpu":  # kernels have returned: what they met is known
            self.check()

    def _enlarged(self, channel: str, size_bytes: int, captured: bool) -> Channel:
        if captured:
            held = self.channels[channel].part_bytes if channel in self.channels else 0
            raise errors.WorkspaceError(
                f"a captured call needs {size_bytes} bytes of symmetric memory, {held} are there, "
                "and memory cannot be had during capture: make the same call once before it is "
                "captured"
            )
        if channel not in self.channels:
            self.channels[channel] = Channel(self.group, self.device, self._status)
        self._meet()  # no rank uses the old memory any more
        self.channels[channel].grow(size_bytes)
        return self.channels[channel]

    def _meet(self) -> None:
        """No rank goes on before all have finished what they have enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.check()  # the others may be gone
        dist.barrier(group=self.group)

    def note(self, words: str) -> None:
        """Record a call by its description; `ProblemMismatch` if a rank is seen to differ."""
        if self.calls is None:
            return
        try:
            self.calls.note(words)
        except errors.ProblemMismatch:
            self.ask()  # it may be that the other rank has failed
            raise

    def check(self) -> None:
        """Raise what has made results of this group worthless, if anything has."""
        if not self._late and self.unavailable is None and (late := self._status.late()):
            reason = self._explain()
            self._late = late + (f" ({reason})" if reason else "")
            self._tell(f"SignalTimeout: {self._late}")
        if self._late:
            raise errors.SignalTimeout(self._late)
        if self.unavailable is None and (refused := self._status.refused()):
            raise errors.CapacityExceeded(refused)
        if self.agreement.broken:
            raise errors.GroupBroken(self.agreement.broken)

    def ask(self) -> None:
        """Raise `GroupBroken` if another rank has told that it failed."""
        self.agreement.failure()
        self.check()

    def open_calls(self) -> list[Channel]:
        """The channels in the middle of a call."""
        return [channel for channel in self.channels.values() if channel.open]

    def guard(self) -> Guard:
        return Guard(self)

    def break_off(self, error: BaseException) -> None:
        """Refuse all calls from now on, on all ranks: `error` has ended one in the middle."""
        with contextlib.suppress(RuntimeError):  # what failed may be the device
            self.engine.join()  # no push reads what the caller gives back
        if not self.agreement.broken:
            self._tell(f"{type(error).__name__}: {error}")

    def _tell(self, failure: str) -> None:
        if self.calls is not None:
            self.calls.break_off()
        self.agreement.break_off(failure)

    def _explain(self) -> str:
        """The likely reason for a signal that did not come."""
        difference = self.calls.difference() if self.calls is not None else ""
        return self.agreement.failure() or self.agreement.refusals() or difference

    @property
    def size_bytes(self) -> int:
        """Symmetric memory held by this rank, in bytes."""
        return sum(channel.size_bytes for channel in self.channels.values())


class Guard:
    """`with space.guard(): ...`: an error that leaves a call open which was begun within breaks the
    group off.

    The call's pushes would stay in flight, and the other ranks would wait for the rest of it.
    """

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def __enter__(self) -> None:
        self._open = self._space.open_calls()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._space.open_calls() != self._open:
            self._space.break_off(error)


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
_statuses: dict[torch.device, Status] = {}


def workspace(group: ProcessGroup, device: torch.device) -> Workspace:
    """The workspace of `group`. Collective at its first call."""
    found = _workspaces.get(group.group_name)
    if found is None or found.group is not group:  # names come back after destroy_process_group
        status = _statuses.setdefault(device, Status(device))
        found = _workspaces[group.group_name] = Workspace(group, device, status)
    return found


def workspaces() -> list[Workspace]:
    """All workspaces of this process, for reports and checks."""
    return list(_workspaces.values())


def check() -> None:
    """Raise `SignalTimeout` if any call enqueued so far has missed a rank, `GroupBroken` after a
    failure in the middle of one.

    On CUDA it speaks of kernels that have finished: call `synchronize`, or this after a
    synchronisation, before results are trusted. Every later call does it too.
    """
    for space in workspaces():
        space.check()


def release() -> None:
    """Forget every workspace; their memory goes with the last tensor that uses it."""
    _workspaces.clear()
    _statuses.clear()


@atexit.register
def _let_groups_go() -> None:
    """Gloo's threads drop the last collectives' tensors whenever they come to it, which aborts a
    process whose interpreter has begun to end. A group that nobody holds joins them before.
    """
    release()
    gc.collect()  # a workspace and its channels hold each other
