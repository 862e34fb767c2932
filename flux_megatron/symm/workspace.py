"""What a group's calls travel through: one workspace a group, shared by all layers, growing to the
largest call.

A workspace has one `Channel` a direction, the agreement of its ranks, and the log of their calls.
"""

from __future__ import annotations

import atexit
import gc
import socket
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.call_log import CallLog
from flux_megatron.symm.channel import Call, Channel


class Workspace:
    """What one group shares: the agreement, a channel for gathers and one for scatters.

    `enter` launches the kernel with which captured calls begin; who has kernels sets it.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.world_size = group, device, group.size()
        self.agreement = Agreement(group)
        self.decisions: dict[Hashable, Any] = {}  # what callers have settled with all ranks
        self.checked: dict[Hashable, Any] = {}  # the same by all that a rank checks of its call
        self.settings: settings.Settings | None = None  # those that `checked` holds for
        self.enter: Callable[[Call, Tensor], None] | None = None
        self.unavailable = _why_unavailable(group, device)
        self.calls = None if self.unavailable else _call_log(group, device)
        if self.unavailable is None:
            self.gather = Channel(group, device, self._explain, self._enter)
            self.scatter = Channel(group, device, self._explain, self._enter)

    def note(self, words: str) -> None:
        """Record a call by its description; `ProblemMismatch` if a rank is seen to differ."""
        if self.calls is not None:
            self.calls.note(words)

    def _enter(self, call: Call, entries: Tensor) -> None:
        assert self.enter is not None, "a call was captured before any was decided on"
        self.enter(call, entries)

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


@atexit.register
def _let_groups_go() -> None:
    """Gloo's threads drop the last collectives' tensors whenever they come to it, which aborts a
    process whose interpreter has begun to end. A group that nobody holds joins them before.
    """
    release()
    gc.collect()  # a workspace and its channels hold each other
