"""Iterations from the folder of `flux-megatron train`: metrics.jsonl, a row for each step.

A resumed training drops the rows that it does again, so repeated steps are not seen here. Where the
last attempt began stands in summary.json, which a training writes when it ends.
"""

from __future__ import annotations

import json
from pathlib import Path

from flux_megatron.results.iterations import Iteration, ResultsError, Series, join, split


def read(folder: Path) -> Series:
    """`ResultsError` for a row that is none; an empty series where there are no rows."""
    iterations, torn = rows(folder / "metrics.jsonl")
    began = _last_start(folder / "summary.json")
    attempts = [
        part
        for attempt in split(iterations, lambda iteration: iteration.number)
        for part in (
            [i for i in attempt if i.number < began],
            [i for i in attempt if i.number >= began],
        )
    ]
    return join(attempts, torn)


def rows(file: Path) -> tuple[list[Iteration], int]:
    """The rows of a file, and whether its last line is torn."""
    if not file.exists():
        return [], 0
    found: list[Iteration] = []
    lines = file.read_text().splitlines(keepends=True)
    for at, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return found, 1
        try:
            row = json.loads(line)
            found.append(
                Iteration(int(row["step"]), int(row["step"]), float(row["seconds"]), row["loss"])
            )
        except (ValueError, KeyError, TypeError) as error:
            what = f"not a row of step, loss and seconds ({error!r}): {line.strip()[:200]!r}"
            raise ResultsError(f"{file}:{at}: {what}") from None
    return found, 0


def _last_start(file: Path) -> int:
    if not file.exists():
        return 0
    try:
        return int(json.loads(file.read_text())["first_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{file}: not the summary of a training: {error!r}") from None
