"""What rank 0 shows of a bench run: a line a case, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.table import Table

from flux_megatron.lab.bench.options import Options
from flux_megatron.lab.bench.records import COMPETITOR, MISSING, OK, OURS, Row
from flux_megatron.lab.bench.suites import Case


def table() -> Table:
    """A line a case: the baselines, ours, and the fastest competitor, with E in brackets."""
    made = Table("case", "M", title="microseconds (E)", title_justify="left")
    for name in ("gemm", "serial", "auto", "best of ours", "best competitor"):
        made.add_column(name, justify="right")
    return made


def show_in(made: Table, options: Options) -> Callable[[Case, list[Row]], None]:
    """What says that a case is done, and adds its line."""
    total = len(options.cases()) * len(options.conditions)

    def show(case: Case, rows: list[Row]) -> None:
        beside = ", beside" * rows[0].beside
        print(f"{made.row_count + 1} of {total}: {case}{beside}", file=sys.stderr, flush=True)
        for row in rows:
            of_competitor = row.status not in (OK, MISSING) and row.role == COMPETITOR
            if of_competitor or (row.status == OK and row.reason):
                print(f"{case}: {row.candidate} {row.status}: {row.reason}", flush=True)
        right = {row.candidate: row for row in rows if row.median_us is not None}
        cells = [_cell(right.get(name)) for name in ("gemm", "serial", "auto")]
        for role in (OURS, COMPETITOR):
            some = [row for row in right.values() if row.role == role and row.candidate != "auto"]
            best = min(some, key=lambda row: row.median_us or 0.0, default=None)
            cells.append(f"{best.candidate} {_cell(best)}" if best else "-")
        made.add_row(f"{case.suite} {case.pattern} {case.op}{beside}", str(case.M), *cells)

    return show


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    hidden = "" if row.efficiency is None or row.role == "library" else f" ({row.efficiency:.2f})"
    return f"{row.median_us:.0f}{hidden}"
