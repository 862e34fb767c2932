"""The other ranks' processes: when a collective fails, who is missing is said by name.

A library tells of a closed connection or of time that ran out, not of the rank behind it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from flux_megatron import errors

STATES = {"T": "is stopped", "t": "is held by a debugger", "Z": "has ended", "X": "has ended"}


class Peers:
    """Where each rank runs. Collective constructor, over all ranks of the run."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(self._places, (self._host, os.getpid()))
        self._rank = dist.get_rank()

    def states(self) -> str:
        """What the kernel tells of the other ranks' processes."""
        others = [
            f"rank {rank} {_state(pid) if host == self._host else f'is on {host}'} (process {pid})"
            for rank, (host, pid) in enumerate(self._places)
            if rank != self._rank
        ]
        return ", ".join(others)


@contextmanager
def named(who: Callable[[], str]) -> Iterator[None]:
    """Raise `RankLost` in place of what a collective says of its connections and clocks.

    `who` tells of the other ranks.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not of_a_collective(error):
            raise
        said = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise errors.RankLost(
            f"rank {os.environ['RANK']} waited for other ranks in a collective ({said}): {who()}"
        ) from error


def of_a_collective(error: BaseException) -> bool:
    """NCCL and the store have types of their own, gloo gives the place in its sources."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    letter = status.rpartition(")")[2].split()[0]  # the name before may hold anything
    return STATES.get(letter, "runs, but did not come")
