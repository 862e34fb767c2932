"""The process group that a call is given: its name, its backend, and how long its ranks wait."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import settings

# Of the group's timeout: our error, which names who waits for what, comes before the backend's.
SHARE = 0.8


def name_of(group: ProcessGroup) -> str:
    """Its `group_name`. `ValueError` for none: which ranks take part is the caller's to say."""
    if group is None:
        raise ValueError(
            "group None given, the process group of the ranks that share the layer expected, such "
            "as torch.distributed.group.WORLD after init_process_group"
        )
    return group.group_name


def group_named(name: str) -> ProcessGroup:
    """The group of this `group_name`, which operators take instead of the group."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


def is_fake(group: ProcessGroup) -> bool:
    """Whether one process stands for all ranks: torch's backend `fake`, for dry runs."""
    return dist.get_backend(group) == "fake"


def is_destroyed(group: ProcessGroup) -> bool:
    return group not in dist.distributed_c10d._world.pg_map


def timeout_s(group: ProcessGroup) -> float:
    """Seconds that a wait for another rank of the group may take: FLUX_MEGATRON_TIMEOUT_S, else a
    share of the group's own timeout.
    """
    if (given := settings.get().timeout_s) is not None:
        return given
    options = (group._get_backend(device).options for device in group._device_types)
    known = (one._timeout for one in options if one is not None)  # `fake` has none
    own = min(known, default=dist.constants.default_pg_timeout)
    return SHARE * own.total_seconds()
