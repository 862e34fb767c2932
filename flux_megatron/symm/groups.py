"""The process group that a call is given."""

from __future__ import annotations

from torch.distributed import ProcessGroup


def name_of(group: ProcessGroup) -> str:
    """Its `group_name`. `ValueError` for none: which ranks take part is the caller's to say."""
    if group is None:
        raise ValueError(
            "group None given, the process group of the ranks that share the layer expected, such "
            "as torch.distributed.group.WORLD after init_process_group"
        )
    return group.group_name
