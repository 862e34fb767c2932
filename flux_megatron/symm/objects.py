"""Python objects among the ranks of a group. torch.distributed has functions for it, but they need
numpy, which torch does not bring along.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron.symm.groups import device_types, is_fake, unwrapped

T = TypeVar("T")


def all_gather(mine: T, group: ProcessGroup) -> list[T]:
    """The object of every rank, by its number. Collective; anything that pickle takes."""
    if is_fake(group):
        return [mine] * group.size()
    data, device = pickle.dumps(mine), _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    sent = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group)
    # pickle ends by itself, before what a shorter object is filled up with
    on_host = [one.cpu() for one in received]
    return [pickle.loads(ctypes.string_at(one.data_ptr(), one.numel())) for one in on_host]


def broadcast(value: T, group: ProcessGroup) -> T:
    """The object of the group's first rank. Collective."""
    return all_gather(value if group.rank() == 0 else None, group)[0]  # type: ignore[return-value]


def _device(group: ProcessGroup) -> torch.device:
    """Where the group's collectives take tensors: on the host, if it has a backend for that."""
    kinds = device_types(group)
    return device_of(group, "cpu" if "cpu" in kinds or not kinds else kinds[0])


def device_of(group: ProcessGroup, kind: str) -> torch.device:
    """The device of this kind that the group is bound to; the current one, if it is to none."""
    bound = unwrapped(group).bound_device_id
    return bound if bound is not None and bound.type == kind else torch.device(kind)
