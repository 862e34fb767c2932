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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from flux_megatron.lab.results.iterations import Iteration, ResultsError, Series, join

HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?\] iteration +(\d+)/ *\d+ \|(.*)")
BEGINNING = re.compile(r"\] iteration +\d+/")
SECONDS = "elapsed time per iteration (ms)"
COUNTS = ("global batch size", "number of skipped iterations", "number of nan iterations")
LOSS = "lm loss"


@dataclass(frozen=True)
class Line:
    """One printed line; `time` orders the attempts, and has a `fraction` from 0.16 on."""

    time: str
    fraction: bool
    iteration: Iteration
    batch: int


def of_megatron(folder: Path, global_batch: int) -> Series:
    """The series of all logs below `folder`, of all ranks and attempts; each line counts once.

    `ResultsError` for a line that is not Megatron's, or is of another `global_batch`. Where there
    are no logs, an empty series.
    """
    seen: set[str] = set()
    attempts: list[list[Line]] = []
    torn = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        begun = False  # an attempt of this file
        for line in _lines(file, seen, global_batch):
            if line is None:
                torn += begun
            elif begun and line.iteration.number > attempts[-1][-1].iteration.number:
                attempts[-1].append(line)
            else:
                attempts.append([line])
                begun = True
    attempts.sort(key=lambda lines: lines[0].time)
    return join(([*_iterations(lines)] for lines in attempts), torn)


def _lines(file: Path, seen: set[str], global_batch: int) -> Iterator[Line | None]:
    """The lines of one file that no other file had; None for a last one that is torn."""
    with file.open(errors="replace", newline="\n") as stream:  # a progress bar's \r ends no line
        for at, raw in enumerate(stream, start=1):
            match = HEAD.search(raw.rstrip())
            line = match and _parse(match)
            if match and line:
                if line.batch != global_batch:
                    what = f"global batch size {line.batch}, but the experiment has {global_batch}"
                    raise ResultsError(f"{file}:{at}: {what}")
                if match.group() not in seen:
                    seen.add(match.group())
                    yield line
            elif not raw.endswith("\n"):
                yield None
            elif BEGINNING.search(raw):
                raise ResultsError(f"{file}:{at}: not a line of Megatron's: {raw.strip()[:200]!r}")


def _parse(match: re.Match[str]) -> Line | None:
    """None if a value is missing or is no number, as in a line cut off."""
    time, fraction, digits, rest = match.groups()
    fields = dict(part.strip().partition(": ")[::2] for part in rest.split("|"))
    try:
        seconds = float(fields[SECONDS]) / 1000
        batch, skipped, nan = (int(fields[name]) for name in COUNTS)
        loss: float | None = float(fields[LOSS]) if LOSS in fields else math.nan
    except (KeyError, ValueError):
        return None
    if skipped and not (loss and loss > 0):
        loss = None  # none of the iterations advanced: 0.17 and later print zero
    iteration = Iteration(int(digits), int(digits), seconds, loss, skipped, nan)
    return (
        Line(time + (fraction or ""), bool(fraction), iteration, batch)
        if rest.endswith("|")
        else None
    )


def _iterations(lines: list[Line]) -> Iterator[Iteration]:
    """Those of one process, each with the first iteration that it is a mean of."""
    first = lines[0].iteration
    yield first
    since = first.number if lines[0].fraction else first.number + 1
    for one in (line.iteration for line in lines[1:]):
        again = first if since == first.number else None  # its skips are in this line too
        skipped, nan = (again.skipped, again.nan) if again else (0, 0)
        yield replace(one, since=since, skipped=one.skipped - skipped, nan=one.nan - nan)
        since = one.number + 1


def of_train(folder: Path) -> Series:
    """`ResultsError` for a row that is none; an empty series where there are no rows."""
    file, found, torn = folder / "metrics.jsonl", list[tuple[int, Iteration]](), 0
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for at, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            torn = 1
            break
        try:
            row = json.loads(line)
            step = int(row["step"])
            iteration = Iteration(step, step, float(row["seconds"]), row["loss"])
            found.append((int(row.get("first_step", 1)), iteration))
        except (ValueError, KeyError, TypeError) as error:
            what = f"not a row of step, loss and seconds ({error!r}): {line.strip()[:200]!r}"
            raise ResultsError(f"{file}:{at}: {what}") from None
    attempts = groupby(found, key=lambda row: row[0])
    return join(([iteration for _, iteration in attempt] for _, attempt in attempts), torn)
