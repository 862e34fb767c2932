"""The display of a bench run on rank 0: a progress bar, or a line a case in a file, and a table at
the end.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flux_megatron.lab.bench.options import Options
from flux_megatron.lab.bench.records import COMPETITOR, MISSING, OK, Row
from flux_megatron.lab.bench.suites import GEMM_PEERS, Case


class Display:
    """A context: `show(case, rows)` after each case. Silent unless `shown`."""

    def __init__(self, options: Options, shown: bool) -> None:
        self._shown = shown
        self._console = Console()
        self._rows: list[list[Row]] = []
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._total = len(options.cases()) * len(options.conditions)
        self._task = self._progress.add_task("", total=self._total)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._shown and self._rows:
            self._console.print(summary(self._rows))

    def show(self, case: Case, rows: list[Row]) -> None:
        self._rows.append(rows)
        self._progress.update(self._task, advance=1, description=str(case))
        if self._shown and not self._console.is_terminal:
            print(f"{len(self._rows)} of {self._total}: {case}", file=sys.stderr, flush=True)
        for row in rows:
            of_competitor = row.status not in (OK, MISSING) and row.role == COMPETITOR
            if of_competitor or (row.status == OK and row.reason):
                self._console.print(f"{case}: {row.candidate} {row.status}: {row.reason}")


def summary(measured: list[list[Row]]) -> Table:
    """A line a case: the baselines, ours, and the fastest competitor, with E in brackets."""
    table = Table(title="microseconds (E)", title_justify="left")
    for name in ("case", "M", "gemm", "serial", "auto", "best of ours", "best competitor"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for rows in measured:
        by_name = {row.candidate: row for row in rows if row.status == OK}
        ours = [r for r in by_name.values() if r.role == "ours" and r.candidate != "auto"]
        competitors = [
            row
            for row in by_name.values()
            if row.role == COMPETITOR and row.candidate not in GEMM_PEERS
        ]
        first = rows[0]
        table.add_row(
            f"{first.suite} {first.pattern} {first.op}" + ", beside" * first.beside,
            str(first.M),
            *(_cell(by_name.get(name)) for name in ("gemm", "serial", "auto")),
            *(
                _cell(min(some, key=_median, default=None), named=True)
                for some in (ours, competitors)
            ),
        )
    return table


def _median(row: Row) -> float:
    assert row.median_us is not None, "a row that is ok has times"
    return row.median_us


def _cell(row: Row | None, named: bool = False) -> str:
    if row is None:
        return "-"
    cell = f"{_median(row):.0f}"
    if row.efficiency is not None and row.role != "library":
        cell += f" ({row.efficiency:.2f})"
    return f"{row.candidate} {cell}" if named else cell
