"""The page of reliability: faults of a job, calls while SMs are held, beside an all-reduce, and in
racing orders. No torch.

It is made from rows, one JSON object a line, selected by their `table`. Of two rows about the same
case the later one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flux_megatron.bench import records
from flux_megatron.bench.markdown import folded, table
from flux_megatron.errors import BadInput

Rows = list[dict[str, Any]]
FAULT = ("fault", "device", "ranks", "runs", "ended", "named", "longest_s", "bound_s", "orphans",
         "leftovers", "errors", "git", "date")  # fmt: skip
HOLD = ("piece", "M", "N", "K", "tp", "version", "strategy", "held_sms", "held_on", "gpu")
BESIDE = ("pattern", "op", "M", "N_local", "K_local", "status", "median_us", "efficiency",
          "provenance")  # fmt: skip
RACE = ("calls", "hangs", "wrong", "replays", "all_reduces", "tp", "max_connections", "gpu")


def text(out: Path, sources: Sequence[Path]) -> str:
    """The page `out` of files of rows; `BadInput` names a row without its fields."""
    rows = [row for file in sources for row in _load(file)]
    command = f"flux-megatron reliability {' '.join(map(str, sources))} --out {out}"
    parts = [
        "# Reliability",
        f"`{command}` writes this page from committed rows; do not edit it. "
        "[Faults of a job](testing.md#faults-of-a-job) says how each is made and how it must end.",
    ]
    empty = len(parts)
    for name, render in TABLES.items():
        if own := [row for row in rows if _table_of(row) == name]:
            parts += render(own)
    if len(parts) == empty:
        given, known = ", ".join(map(str, sources)), ", ".join(TABLES)
        raise BadInput(f"{given}: no rows of the tables {known}, one expected")
    return "\n\n".join(parts) + "\n"


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
    return ["## Does every fault end the job?",
            f"Run on {dates}. **Bold: a run that did not end as it must.**",
            _folded("faults", header, lines)]  # fmt: skip


def hold(rows: Rows) -> list[str]:
    """A line a call and strategy: us by the number of SMs held on all ranks, and the largest ratio
    to NCCL + cuBLAS under the same hold, on all ranks or on one.
    """
    rows = [row for row in rows if "us" in row]
    counts = sorted({row["held_sms"] for row in rows})
    calls: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        name = row["strategy"] + (", before" if row["version"] == "old" else "")
        shape = f"{row['M']} x {row['N']} x {row['K']}"
        calls.setdefault((row["piece"], row["tp"], shape, name), []).append(row)
    lines = []
    for (piece, tp, shape, name), own in calls.items():
        cells = {row["held_sms"]: _held(row) for row in own if row["held_on"] in ("none", "all")}
        worst = max((row["to_sequential"] for row in own if row["held_sms"]), default=0.0)
        lines.append([piece, str(tp), shape, name, *(cells.get(count, "-") for count in counts),
                      f"{worst:.2f}"])  # fmt: skip
    header = ["call", "TP", "M x N x K, local", "strategy", *map(_sms, counts), "worst"]
    intro = (
        "A kernel that only spins holds SMs of every rank. The table has the microseconds until "
        "the call is done. `worst` is the largest ratio to `sequential` (cuBLAS and NCCL) under "
        "the same hold, on all ranks or on one. **Bold: the call ended after the hold.** "
        '"before" is the version with fixed lists of tiles for each CTA '
        "([decision 19](decisions/0019-tiles-are-drawn.md)), in the same race."
    )
    return ["## Does a call end while SMs are held?", _where(rows), intro,
            _folded("calls", header, lines)]  # fmt: skip


def race(rows: Rows) -> list[str]:
    """A line a run: calls in random orders beside all-reduces of a second communicator."""
    lines = [
        [f"{row['tp']} x {row['gpu']}", str(row["max_connections"]), str(row["calls"]),
         str(row["replays"]), str(row["all_reduces"]), _bold(str(row["hangs"]), row["hangs"]),
         _bold(str(row["wrong"]), row["wrong"])]
        for row in rows
    ]  # fmt: skip
    header = ["ranks", "CUDA_DEVICE_MAX_CONNECTIONS", "calls", "of them replays of graphs",
              "all-reduces of 512 MB", "hangs", "wrong results"]  # fmt: skip
    intro = (
        "Each rank launches all-reduces of a second communicator before or after a call, in an "
        "order of its own."
    )
    return ["## Does a call survive racing orders?", intro, table(header, lines)]


def _held(row: dict[str, Any]) -> str:
    return _bold(f"{row['us']:.0f}", row["held_sms"] and not row["finished_while_held"])


def _sms(count: int) -> str:
    return f"{count} SMs" if count > 1 else "1 SM" if count else "free"


def _where(rows: Rows) -> str:
    runs = sorted({(row["gpu"], row["date"][:10], row["commit"], row["torch"], row["triton"])
                   for row in rows})  # fmt: skip
    return "; ".join(
        f"{gpu}, {date} (commit {commit}, torch {torch}, triton {triton})"
        for gpu, date, commit, torch, triton in runs
    )


def beside(rows: Rows) -> list[str]:
    """A line a call, alone and beside an all-reduce: us, and E, of GEMMs, baselines and strategies.

    Rows are those of `flux-megatron bench --beside`.
    """
    calls: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        about, shape = row["provenance"], f"{row['M']} x {row['N_local']} x {row['K_local']}"
        where = "beside" if row.get("beside") else "alone"
        key = (f"{row['pattern']} {row['op']}", about["world_size"], shape,
               about["max_connections"], where)  # fmt: skip
        calls.setdefault(key, {})[row["candidate"]] = row
    lines = [
        [*map(str, key), *(_efficiency(found.get(name)) for name in CANDIDATES)]
        for key, found in calls.items()
    ]
    header = ["call", "TP", "M x N x K, local", "CUDA_DEVICE_MAX_CONNECTIONS", "", *CANDIDATES]
    intro = (
        "Microseconds, and overlap efficiency E in brackets: alone, and beside all-reduces of "
        "512 MB ([protocol and candidates](measuring.md#beside-other-kernels))."
    )
    where = _where([row["provenance"] for row in rows])
    return ["## How fast is a call beside an all-reduce?", where, intro,
            _folded("calls", header, lines)]  # fmt: skip


def _efficiency(row: dict[str, Any] | None) -> str:
    if row is None or row["status"] != "ok":
        return "-"
    rounded = "" if row["efficiency"] is None else f" ({row['efficiency']:.2f})"
    return f"{row['median_us']:.0f}{rounded}"


CANDIDATES = ("gemm", "serial", "megatron", "hopper", "fused", "pipelined")
TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "faults": faults, "hold": hold, "beside": beside, "race": race
}  # fmt: skip
FIELDS = {"faults": FAULT, "hold": HOLD, "beside": BESIDE, "race": RACE}


def _table_of(row: dict[str, Any]) -> str:
    return "beside" if "candidate" in row else row.get("table", "")  # bench names no table


def _load(file: Path) -> Rows:
    rows = []
    for row, place in records.lines(file):
        if missing := [name for name in FIELDS.get(_table_of(row), ()) if name not in row]:
            raise BadInput(f"{place}: without {', '.join(missing)}")
        rows.append(row)
    return rows


def _counts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in row["errors"].items())


def _bold(text: str, bad: object) -> str:
    return f"**{text}**" if bad else text


def _folded(what: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return folded(f"{len(lines)} {what}", table(header, lines))
