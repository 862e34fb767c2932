"""The workspace of a group: one, which all layers share and which grows to the largest call."""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Hashable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm import cuda_memory, objects
from flux_megatron.symm.device import active, capturing
from flux_megatron.symm.groups import SHARE, given, is_listed, name_of, timeout_s, unwrapped
from flux_megatron.symm.workspace import Workspace, of_groups
from flux_megatron.versions.library import warn_of_untested
from flux_megatron.versions.torch import TORCH
from flux_megatron.versions.triton import TRITON

_log = logging.getLogger(__name__)
# by what callers give
_agreed_before: WeakKeyDictionary[ProcessGroup, dict[Hashable, Any]] = WeakKeyDictionary()
_lost: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()  # and why: nothing helps these


def workspace(group: ProcessGroup, device: torch.device) -> Workspace:
    """The workspace of `group`, of what is inside it now. Collective at its first call."""
    inside = unwrapped(group)
    found = of_groups.get(inside)
    if found is None:
        _give_back(_ended(given(group)))
        if lost := _lost.get(inside):
            raise errors.GroupBroken(lost)
        warn_of_untested(TORCH, TRITON)
        with active(device):
            found = Workspace(inside, device)
        found.given = ref(group)
        of_groups[inside] = found
        _remember(found, _agreed_before.pop(group, {}))
        _log_bound(timeout_s(group), settings.get().timeout_s is not None)
    return found


def _ended(group: ProcessGroup) -> list[Workspace]:
    """Of the groups that are destroyed, and of what was inside `group` before."""
    living_now = living()
    return [one for one in workspaces() if one.given() is group or one not in living_now]


def _remember(space: Workspace, agreed: dict[Hashable, Any]) -> None:
    """Take over what the group agreed on before its memory was given back, if all ranks know the
    same of it: a failure may have left one without. Collective.
    """
    known = objects.all_gather([repr(key) for key in agreed], space.group)
    if all(one == known[0] for one in known):
        space.agreed.update(agreed)


@cache
def _log_bound(seconds: float, given: bool) -> None:
    why = "FLUX_MEGATRON_TIMEOUT_S" if given else f"{SHARE:g} of the group's timeout"
    _log.info(f"flux_megatron: a wait for another rank ends after {seconds:g} s ({why})")


def workspaces() -> list[Workspace]:
    """All workspaces of this process, for reports and checks."""
    return list(of_groups.values())


def living() -> list[Workspace]:
    """Those whose groups are not destroyed: what has failed in one that is concerns nobody."""
    return [one for one in workspaces() if not one.listed or is_listed(one.group)]


def check() -> None:
    """Raise `SignalTimeout` if a wait of any call so far ran out of time, `GroupBroken` after a
    failure in the middle of a call.

    On CUDA this covers the kernels that have finished: before you trust results, call
    `synchronize`, or this after a synchronisation. Every later call of the group checks too, and
    nothing is raised of a group that is destroyed.
    """
    for space in living():
        space.check()


def release(group: ProcessGroup | None = None, *, graphs_dropped: bool = False) -> None:
    """Give back the symmetric memory of `group`, or of all groups, with its buffers.

    Every rank of the group calls it, between two calls; none waits for another, each for its own
    device. `WorkspaceError`, and nothing is given back, in the middle of a call, in a capture, and
    after a capture unless `graphs_dropped` says that no graph of before will be replayed. The next
    call of the group takes memory again and knows the plans of before, unless a call has failed.
    Groups that are destroyed lose their memory by themselves, at the latest when a call of a new
    group comes, as what was inside a framework's class does when another group is there. A group
    that torch does not list keeps it until then. `TypeError` for what is no group.
    """
    if group is not None and not isinstance(group, ProcessGroup):
        expected = "a torch.distributed.ProcessGroup, or None for all, expected"
        raise TypeError(f"release: group {group!r} given, {expected}")
    inside = group and unwrapped(group)
    chosen = [s for s in workspaces() if group is None or s.group is inside or s.given() is group]
    for space in chosen:
        if reason := _why_held(space, graphs_dropped):
            name = name_of(space.group)
            raise errors.WorkspaceError(f"release: the memory of group {name} is held: {reason}")
    _lost.update({space.group: lost for space in chosen if (lost := space.agreement.lost)})
    _give_back(chosen)


def _why_held(space: Workspace, graphs_dropped: bool) -> str | None:
    """Why the memory cannot be given back now."""
    if capturing(space.device):
        return "a CUDA graph is being captured"
    if space.open_calls() and not space.has_failed:
        return "a call is in flight; call it between two calls"
    if not graphs_dropped and any(one.held_by_graph for one in space.holders()):
        return (
            "a captured CUDA graph has its addresses; drop the graphs of our calls and pass "
            "graphs_dropped=True"
        )
    return None


def _give_back(spaces: list[Workspace]) -> None:
    for device in {space.device for space in spaces}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for space in spaces:
        group = space.given()
        if group is not None and not space.has_failed:
            _agreed_before[group] = space.agreed.copy()
        of_groups.pop(space.group).close()


@atexit.register
def _let_groups_go() -> None:
    """Join gloo's threads before the interpreter ends, by dropping the groups.

    A thread that drops the last collective's tensors later aborts the process.
    """
    cuda_memory.process_ends()
    of_groups.clear()
    _agreed_before.clear()
    gc.collect()  # workspaces and channels refer to each other
