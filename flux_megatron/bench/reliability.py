"""The page of reliability: faults of a job, calls beside held SMs, racing orders. No torch.

Written from rows, one JSON object a line, told apart by `table`; rows of other tables are left to
other pages. Of two rows about the same the later one counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
FAULT = ("fault", "device", "ranks", "runs", "ended", "named", "longest_s", "bound_s", "orphans",
         "leftovers", "errors", "git", "date")  # fmt: skip
HOLD = ("pattern", "M", "N", "K", "tp", "strategy", "held_sms", "held_on", "arm", "ms")
RACE = ("mode", "calls", "hangs")


def write(out: Path, sources: Sequence[Path]) -> None:
    """Write the page `out` from files of rows; `ValueError` names a row without its fields."""
    rows = [row for file in sources for row in _load(file)]
    command = f"flux-megatron reliability {' '.join(map(str, sources))} --out {out}"
    parts = [
        "# Reliability",
        f"Made by `{command}` from committed rows; do not edit. "
        "[faults.md](faults.md) says how faults are made and what is asked of each end.",
    ]
    for table, render in TABLES.items():
        if own := [row for row in rows if row.get("table") == table]:
            parts += render(own)
    out.write_text("\n\n".join(parts) + "\n")


def faults(rows: Rows) -> list[str]:
    """A line a fault: how many of its runs ended, by a named error on every rank, and when."""
    newest = {(row["device"], row["fault"]): row for row in rows}
    lines = []
    for row in newest.values():
        bad = row["ended"] < row["runs"] or row["named"] < row["runs"]
        bad = bad or row["orphans"] or row["leftovers"]
        lines.append([
            _bold(row["fault"], bad), f"{row['ranks']} x {row['device']}", str(row["runs"]),
            str(row["ended"]), str(row["named"]), f"{row['longest_s']:.1f}",
            f"{row['bound_s']:g}", str(row["orphans"]), str(row["leftovers"]), _counts(row),
        ])  # fmt: skip
    dates = ", ".join(sorted({f"{row['date']} ({row['git']})" for row in newest.values()}))
    header = ["fault", "ranks", "runs", "ended", "as expected", "longest, s", "bound, s",
              "orphans", "left in shared memory", "errors on the ranks"]  # fmt: skip
    return ["## Faults of a job", f"Run on {dates}. **Bold: not all is well.**",
            _table(header, lines)]  # fmt: skip


def hold(rows: Rows) -> list[str]:
    """A line a call, plan and number of held SMs: ms of each arm, by the ranks that hold them."""
    calls: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = (row["pattern"], row["tp"], row["M"], row["N"], row["K"], row["strategy"],
               row["held_sms"])  # fmt: skip
        calls.setdefault(key, {})[f"{row['arm']}, {row['held_on']}"] = row["ms"]
    columns = [*dict.fromkeys(name for times in calls.values() for name in times)]
    lines = [
        [pattern, str(tp), f"{M} x {N} x {K}", strategy, str(held),
         *(f"{times[name]:.2f}" if name in times else "-" for name in columns)]
        for (pattern, tp, M, N, K, strategy, held), times in calls.items()
    ]  # fmt: skip
    header = ["pattern", "TP", "M x N x K", "strategy", "held SMs", *columns]
    intro = "Milliseconds until the call is done, by arm and by the ranks on which SMs are held."
    return ["## Beside other kernels", intro, _table(header, lines)]


def race(rows: Rows) -> list[str]:
    """A line a mode: calls in random orders with a second communicator, and how many hung."""
    lines = [[_bold(row["mode"], row["hangs"]), str(row["calls"]), str(row["hangs"])]
             for row in {row["mode"]: row for row in rows}.values()]  # fmt: skip
    return ["## Racing orders", _table(["mode", "calls", "hangs"], lines)]


TABLES: dict[str, Callable[[Rows], list[str]]] = {"faults": faults, "hold": hold, "race": race}
FIELDS = {"faults": FAULT, "hold": HOLD, "race": RACE}


def _load(file: Path) -> Rows:
    rows = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        row = json.loads(line)
        expected = FIELDS.get(row.get("table", ""), ())
        if missing := [name for name in expected if name not in row]:
            raise ValueError(f"{file.name} line {number}: without {', '.join(missing)}")
        rows.append(row)
    return rows


def _counts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in row["errors"].items())


def _bold(text: str, bad: object) -> str:
    return f"**{text}**" if bad else text


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
