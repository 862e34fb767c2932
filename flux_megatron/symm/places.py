"""Where the ranks of a group are: their devices, their machines, whether they can share memory, and
where each one's host is rung.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import objects
from flux_megatron.symm.groups import is_fake

_NONCE_BYTES = 32


class Place(NamedTuple):
    device: str
    machine: str
    doorbell: str


class Missing(NamedTuple):
    """Why kernels reach no memory of other ranks, and whether copy engines do: mailboxes in the
    host's memory (`symm.mailbox`).
    """

    reason: str
    mailboxes: bool = False


def places(group: ProcessGroup, device: torch.device, doorbell: str) -> list[Place]:
    """The place of each rank, by its number. Collective."""
    mine = (device.type, machine(), doorbell)
    return [Place(*one) for one in objects.all_gather(mine, group)]


def machine() -> str:
    """The running kernel: containers of one machine have it in common, whatever they are called."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def why_unavailable(ranks: list[Place], group: ProcessGroup) -> str | None:
    """Why the ranks cannot have symmetric memory, the same on all of them, or None. Collective."""
    if len({place.device for place in ranks}) > 1:
        listed = ", ".join(f"rank {r}: {place.device}" for r, place in enumerate(ranks))
        raise errors.ProblemMismatch(f"the ranks brought tensors on different devices ({listed})")
    if is_fake(group):
        return "the group's backend is fake: one process stands for all ranks"
    if (nodes := len({place.machine for place in ranks})) > 1:
        return f"the group spans {nodes} nodes, symmetric memory needs one"
    unseen = objects.all_gather(_unseen(group), group)
    if pairs := [
        f"rank {r} that of rank {other}" for r, found in enumerate(unseen) for other in found
    ]:
        return f"ranks of one machine cannot open each other's memory: {', '.join(pairs)}"
    return None


def _unseen(group: ProcessGroup) -> list[int]:
    """The ranks whose memory this one cannot open, as those in another container. Collective."""
    nonce = uuid.uuid4().hex
    descriptor = os.memfd_create("flux_megatron")
    try:
        os.write(descriptor, nonce.encode())
        shown = objects.all_gather((f"/proc/{os.getpid()}/fd/{descriptor}", nonce), group)
        found = [rank for rank, (path, text) in enumerate(shown) if _read(path) != text]
        objects.all_gather(None, group)  # all have looked
        return found
    finally:
        os.close(descriptor)


def _read(path: str) -> str:
    """What stands there: another file, where the same number is another process."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(_NONCE_BYTES).decode(errors="replace")
    return ""
