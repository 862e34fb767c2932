"""Collectives of virtual ranks: each is a strand of its rank's copy stream, as NCCL's kernels are
work of a stream. A rank reads what the others bring when all have come, and not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from torch import Tensor
from virtual_ranks import Scheduler


class VirtualCollectives:
    """Of one group. The n-th collective of a rank meets the n-th of all others."""

    def __init__(self, world_size: int, scheduler: Callable[[], Scheduler]) -> None:
        self._world_size, self._scheduler = world_size, scheduler
        self._begun: Counter[int] = Counter()  # by rank
        self._brought: dict[int, dict[int, Tensor]] = {}  # by number and rank
        self._read: Counter[int] = Counter()  # by number

    def enqueue(
        self, name: str, target: Tensor, source: Tensor, share: Callable[[Tensor], Tensor]
    ) -> None:
        """target <- share(sum of the ranks' sources), in the calling rank's copy stream."""
        scheduler = self._scheduler()
        body = partial(self._run, scheduler.rank, target, source, share)
        scheduler.enqueue("copy", name, body)

    def _run(
        self, rank: int, target: Tensor, source: Tensor, share: Callable[[Tensor], Tensor]
    ) -> None:
        number = self._begun[rank]
        self._begun[rank] += 1
        brought = self._brought.setdefault(number, {})
        brought[rank] = source
        scheduler = self._scheduler()
        scheduler.wait(lambda: len(brought) == self._world_size, "a collective's other ranks")
        shapes = {tensor.shape for tensor in brought.values()}
        assert len(shapes) == 1, f"ranks bring {shapes} to one collective"
        result = share(sum(brought[r] for r in range(self._world_size)))
        self._read[number] += 1
        scheduler.wait(lambda: self._read[number] == self._world_size, "others that still read")
        target.copy_(result)
