"""Iterations from the folder of `flux-megatron train`: metrics.jsonl, a row for each step.

A resumed training drops the rows that it does again, so repeated steps are not seen here; each row
has the first step of its process.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from flux_megatron.results.iterations import Iteration, ResultsError, Series, join


def read(folder: Path) -> Series:
    """`ResultsError` for a row that is none; an empty series where there are no rows."""
    found, torn = rows(folder / "metrics.jsonl")
    attempts = groupby(found, key=lambda row: row[0])
    return join([[iteration for _, iteration in attempt] for _, attempt in attempts], torn)


def rows(file: Path) -> tuple[list[tuple[int, Iteration]], int]:
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
