"""Iterations from the logs of both programs, Megatron-LM and `flux-megatron train`.

Megatron-LM, core_v0.14.0 to core_v0.19.0: its last rank prints one line every --log-interval
iterations (`training_log`):

     [2026-11-21 18:00:00.123456] iteration        2/      50 | consumed samples:  ... | elapsed ...

Two things differ between releases. To 0.15 the time has no fraction of a second, and a line is the
mean since the line before it. From 0.16 on the time has one; a process also prints its very first
iteration, and the line after that is a mean over this first one too, its loss like its time.

`flux-megatron train`: metrics.jsonl, a row for each step. A resumed training drops the rows that it
does again, so repeated steps are not seen here; each row has the first step of its process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from flux_megatron.lab.results.iterations import Iteration, ResultsError, Series, join, split

HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?\] iteration +(\d+)/ *\d+ \|(.*)")
BEGINNING = re.compile(r"\] iteration +\d+/")
SECONDS = "elapsed time per iteration (ms)"
COUNTS = ("global batch size", "number of skipped iterations", "number of nan iterations")
LOSS = "lm loss"


@dataclass(frozen=True)
class Line:
    """One printed line; `time` orders the attempts."""

    file: Path
    at: int
    time: str
    counts_again: bool  # whether the second line of a process is a mean over its first one too
    number: int
    seconds: float
    loss: float | None
    batch: int
    skipped: int
    nan: int


def of_megatron(folder: Path, global_batch: int) -> Series:
    """The series of all logs below `folder`, of all ranks and attempts; each line counts once.

    `ResultsError` for a line that is not Megatron's, or is of another `global_batch`. Where there
    are no logs, an empty series.
    """
    seen: set[str] = set()
    attempts: list[list[Line]] = []
    torn = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        lines, unfinished = _lines(file, seen)
        torn += unfinished
        attempts += split(lines, lambda line: line.number)
    for line in (line for attempt in attempts for line in attempt):
        if line.batch != global_batch:
            what = f"global batch size {line.batch}, but the experiment has {global_batch}"
            raise ResultsError(f"{line.file}:{line.at}: {what}")
    attempts.sort(key=lambda lines: lines[0].time)
    return join(map(_iterations, attempts), torn)


def _lines(file: Path, seen: set[str]) -> tuple[list[Line], int]:
    """The lines of one file that no other file had, and whether its last one is torn."""
    lines = []
    with file.open(errors="replace", newline="\n") as stream:  # a progress bar's \r ends no line
        for at, raw in enumerate(stream, start=1):
            match = HEAD.search(raw.rstrip())
            line = None if match is None else _parse(match, file, at)
            if match is not None and line is not None:
                if match.group() not in seen:
                    seen.add(match.group())
                    lines.append(line)
            elif not raw.endswith("\n"):
                return lines, int(bool(lines))
            elif BEGINNING.search(raw):
                raise ResultsError(f"{file}:{at}: not a line of Megatron's: {raw.strip()[:200]!r}")
    return lines, 0


def _parse(match: re.Match[str], file: Path, at: int) -> Line | None:
    """None if a value is missing or is no number, as in a line cut off."""
    time, fraction, number, rest = match.groups()
    if not rest.endswith("|"):
        return None
    fields = dict(part.strip().partition(": ")[::2] for part in rest.split("|"))
    try:
        seconds = float(fields[SECONDS]) / 1000
        batch, skipped, nan = (int(fields[name]) for name in COUNTS)
        loss: float | None = float(fields[LOSS]) if LOSS in fields else math.nan
    except (KeyError, ValueError):
        return None
    if skipped and not (loss and loss > 0):
        loss = None  # none of the iterations advanced: 0.17 and later print zero
    return Line(file, at, time + (fraction or ""), bool(fraction), int(number), seconds, loss,
                batch, skipped, nan)  # fmt: skip


def _iterations(lines: Sequence[Line]) -> list[Iteration]:
    """The lines of one process, with the iterations that each is a mean of."""
    first, *others = lines
    found = [
        Iteration(first.number, first.number, first.seconds, first.loss, first.skipped, first.nan)
    ]
    since = first.number if first.counts_again else first.number + 1
    for line in others:
        again = first if since == first.number else None  # its skips are in this line too
        skipped = line.skipped - (again.skipped if again else 0)
        nan = line.nan - (again.nan if again else 0)
        found.append(Iteration(line.number, since, line.seconds, line.loss, skipped, nan))
        since = line.number + 1
    return found


def of_train(folder: Path) -> Series:
    """`ResultsError` for a row that is none; an empty series where there are no rows."""
    found, torn = _rows(folder / "metrics.jsonl")
    attempts = groupby(found, key=lambda row: row[0])
    return join([[iteration for _, iteration in attempt] for _, attempt in attempts], torn)


def _rows(file: Path) -> tuple[list[tuple[int, Iteration]], int]:
    """The rows of a file, each with its process's first step, and whether the last line is torn."""
    if not file.exists():
        return [], 0
    found: list[tuple[int, Iteration]] = []
    lines = file.read_text().splitlines(keepends=True)
    for at, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return found, 1
        try:
            row = json.loads(line)
            step = int(row["step"])
            iteration = Iteration(step, step, float(row["seconds"]), row["loss"])
            found.append((int(row.get("first_step", 1)), iteration))
        except (ValueError, KeyError, TypeError) as error:
            what = f"not a row of step, loss and seconds ({error!r}): {line.strip()[:200]!r}"
            raise ResultsError(f"{file}:{at}: {what}") from None
    return found, 0
