"""The iterations of one arm of one run, put together from its attempts.

A job that is requeued continues from its last checkpoint, so a later attempt may repeat iterations.
What it wrote replaces them, and all that was to come after them: the run that goes on is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flux_megatron.errors import BadInput


class ResultsError(BadInput):
    """A run that cannot be read; names the file, and the line of it that is to blame."""


@dataclass(frozen=True)
class Iteration:
    """A line of a log: iteration `number`, or the mean of `since` to `number`."""

    number: int
    since: int
    seconds: float  # of one iteration
    loss: float | None  # None where all was skipped; nan where the log has none without a skip
    skipped: int = 0
    nan: int = 0  # of the skipped ones, those whose loss was not finite


@dataclass(frozen=True)
class Series:
    """`iterations` in order, each once; `starts` has the first of every attempt."""

    iterations: tuple[Iteration, ...] = ()
    starts: tuple[int, ...] = ()
    replaced: int = 0  # iterations that a later attempt did again, or left behind
    torn: int = 0  # last lines that a killed process did not finish

    @property
    def restarts(self) -> tuple[int, ...]:
        return self.starts[1:]

    def warm(self, warmup: int) -> tuple[Iteration, ...]:
        """Those that average over none of the first `warmup` iterations of any attempt."""
        starts = ((i, max(start for start in self.starts if start <= i.since))
                  for i in self.iterations)  # fmt: skip
        return tuple(i for i, start in starts if i.since - start >= warmup)


def join(attempts: Iterable[Sequence[Iteration]], torn: int = 0) -> Series:
    kept: list[Iteration] = []
    starts: list[int] = []
    replaced = 0
    for attempt in filter(None, attempts):
        first = attempt[0].since
        before = [iteration for iteration in kept if iteration.number < first]
        replaced += len(kept) - len(before)
        kept = [*before, *attempt]
        starts = [*(start for start in starts if start < first), first]
    return Series(tuple(kept), tuple(starts), replaced, torn)
