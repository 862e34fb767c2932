"""Where the ranks of a group are: their devices, their nodes, and where each one's host is rung."""

from __future__ import annotations

import socket
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import objects


class Place(NamedTuple):
    device: str
    host: str
    doorbell: str


def places(group: ProcessGroup, device: torch.device, doorbell: str) -> list[Place]:
    """The place of each rank, by its number. Collective."""
    mine = (device.type, socket.gethostname(), doorbell)
    return [Place(*one) for one in objects.all_gather(mine, group)]


def why_unavailable(ranks: list[Place]) -> str | None:
    """Why the ranks cannot have symmetric memory, or None."""
    if len({place.device for place in ranks}) > 1:
        listed = ", ".join(f"rank {r}: {place.device}" for r, place in enumerate(ranks))
        raise errors.ProblemMismatch(f"the ranks brought tensors on different devices ({listed})")
    if (nodes := len({place.host for place in ranks})) > 1:
        return f"the group spans {nodes} nodes, symmetric memory needs one"
    return None
