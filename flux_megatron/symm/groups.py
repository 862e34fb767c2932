"""The process group that a call is given: what is inside, its name, and how long its ranks wait.

A group is whatever answers `rank`, `size` and collectives. Frameworks put classes of their own
around torch's groups, and make anew what is inside; others make groups that torch does not list.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import settings

# Of the group's timeout: our error, which names who waits for what, comes before the backend's.
SHARE = 0.8

# names of ours, for groups that torch does not find by theirs; whoever made a group keeps it
_names: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
_named: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()
_numbers = itertools.count()
# of the backends of groups, which have their timeouts: every call of new rows asks
_options: WeakKeyDictionary[ProcessGroup, list[Any]] = WeakKeyDictionary()


def unwrapped(group: ProcessGroup) -> ProcessGroup:
    """The group that now is inside, where `group` is a framework's class without a backend of its
    own which holds one group of as many ranks; else `group`.
    """
    if type(group) is ProcessGroup or not isinstance(group, ProcessGroup):
        return group
    if ProcessGroup._device_types.fget(group):  # type: ignore[attr-defined]
        return group
    held = {id(one): one for one in vars(group).values() if isinstance(one, ProcessGroup)}
    if len(held) != 1:
        return group
    inside = unwrapped(*held.values())
    return inside if inside.size() == group.size() else group


def given(group: ProcessGroup) -> ProcessGroup:
    """`group`. `ValueError` for none: which ranks take part is the caller's to say. `TypeError` for
    what is no group.
    """
    if group is None:
        raise ValueError(
            "group None given, the process group of the ranks that share the layer expected, such "
            "as torch.distributed.group.WORLD after init_process_group"
        )
    # torch 2.11's Dynamo cannot ask a group for an attribute
    if not torch.compiler.is_dynamo_compiling() and not hasattr(group, "size"):
        raise TypeError(
            f"group {group!r} given, a torch.distributed.ProcessGroup with this rank expected"
        )
    return group


def name_of(group: ProcessGroup) -> str:
    """The name under which `group_named` finds it, whatever is inside: torch's, or one of ours."""
    if torch.compiler.is_dynamo_compiling():  # which knows torch's groups alone
        return given(group).group_name
    with contextlib.suppress(Exception):  # a framework's class may do anything here
        name = given(group).group_name
        if dist.distributed_c10d._resolve_process_group(name) is group:
            return name
    if given(group) not in _names:
        name = _names[group] = f"flux_megatron {next(_numbers)}"  # type: ignore[assignment, unused-ignore]
        _named[name] = group
    return _names[group]


def group_named(name: str) -> ProcessGroup:
    """The group of this name, which operators take instead of the group."""
    if name in _named:
        return _named[name]
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


def is_listed(group: ProcessGroup) -> bool:
    """Whether it is one of torch's groups, and not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def is_fake(group: ProcessGroup) -> bool:
    """Whether one process stands for all ranks: torch's backend `fake`, for dry runs."""
    group = unwrapped(group)
    return is_listed(group) and dist.get_backend(group) == "fake"


def store_of(group: ProcessGroup) -> dist.Store:
    """A key-value store that all ranks of the group reach."""
    return unwrapped(group).get_group_store() or dist.distributed_c10d._get_default_store()


def device_types(group: ProcessGroup) -> list[str]:
    """Of the devices whose tensors its collectives take."""
    found = [device.type for device in unwrapped(group)._device_types]
    return found or dist.Backend.backend_capability.get(group.name(), [])


def timeout_s(group: ProcessGroup) -> float:
    """Seconds that a wait for another rank of the group may take: FLUX_MEGATRON_TIMEOUT_S, else a
    share of the group's own timeout.
    """
    if (given := settings.get().timeout_s) is not None:
        return given
    group = unwrapped(group)
    if (options := _options.get(group)) is None:
        found = [group._get_backend(device).options for device in group._device_types]
        options = _options[group] = [one for one in found if one is not None]  # `fake` has none
    own = min([one._timeout for one in options], default=dist.constants.default_pg_timeout)
    return min(SHARE * own.total_seconds(), settings.LONGEST_S)
