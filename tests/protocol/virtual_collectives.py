"""Collectives of virtual ranks: each is a strand of its rank's copy stream, as NCCL's kernels are
work of a stream. A rank reads what the others bring when all have come, and not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from virtual_ranks import Scheduler

Take = Callable[[list[Any]], Callable[[], object]]


class VirtualCollectives:
    """Of one group. The n-th collective of a rank meets the n-th of all others."""

    def __init__(self, world_size: int, scheduler: Callable[[], Scheduler]) -> None:
        self._world_size, self.scheduler = world_size, scheduler
        self._begun: Counter[int] = Counter()  # by rank
        self._brought: dict[int, dict[int, Any]] = {}  # by number and rank
        self._read: Counter[int] = Counter()  # by number

    def enqueue(self, name: str, brings: Any, take: Take) -> None:
        """In the calling rank's copy stream. `take` is given what each rank brings, and returns
        what writes the result when all have read.
        """
        scheduler = self.scheduler()
        scheduler.enqueue("copy", name, partial(self._run, scheduler.rank, brings, take))

    def _run(self, rank: int, brings: Any, take: Take) -> None:
        number = self._begun[rank]
        self._begun[rank] += 1
        brought = self._brought.setdefault(number, {})
        brought[rank] = brings
        scheduler = self.scheduler()
        scheduler.wait(lambda: len(brought) == self._world_size, "a collective's other ranks")
        write = take([brought[r] for r in range(self._world_size)])
        self._read[number] += 1
        scheduler.wait(lambda: self._read[number] == self._world_size, "others that still read")
        write()
