"""The other ranks' processes: when a collective fails, the error names the ranks that are missing.

A library reports a closed connection or a timeout, not the rank behind it.
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


class RankStates:
    """Where each rank runs. Collective constructor, over all ranks of the run."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(self._places, (self._host, os.getpid()))
        self._rank = dist.get_rank()

    def states(self) -> str:
        """The state of each other rank's process, from /proc."""
        others = [
            f"rank {rank} {_state(pid) if host == self._host else f'is on {host}'} (process {pid})"
            for rank, (host, pid) in enumerate(self._places)
            if rank != self._rank
        ]
        return ", ".join(others)


@contextmanager
def naming_lost_ranks(describe: Callable[[], str]) -> Iterator[None]:
    """Raise `RankLost` in place of a collective's own error of connections and timeouts.

    `describe` gives the states of the other ranks.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not of_a_collective(error):
            raise
        cause = (str(error).strip() or repr(error)).splitlines()[0]
        rank = os.environ["RANK"]
        raise errors.RankLost(
            f"rank {rank} waited for other ranks in a collective ({cause}): {describe()}"
        ) from error


def of_a_collective(error: BaseException) -> bool:
    """NCCL and the store raise types of their own; gloo's text has the path of a source file."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    letter = status.rpartition(")")[2].split()[0]  # the name before may hold anything
    return STATES.get(letter, "runs, but did not come")
