"""Rows as a table of outcomes by release."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OUTCOMES = ("equal", "refused", "finding")


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; a combination that stock cannot run either is told, and does not count."""
    lines = [
        "| Megatron-LM | combinations | equal | refused by name | findings | calls overlapped "
        "| largest difference of a loss in fp32 | stock fails too |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    releases = sorted({row["release"] for row in rows})
    lines += [_line(name, [row for row in rows if row["release"] == name]) for name in releases]
    return "\n".join([*lines, _line("all", rows)])


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    count = Counter(row["outcome"] for row in rows)
    counted = sum(count[outcome] for outcome in OUTCOMES)
    overlapped, calls = (sum(row[key] for row in rows) for key in ("overlapped", "calls"))
    losses = [row["largest"].get("loss", 0) for row in rows if row["precision"] == "fp32"]
    return (
        f"| {name} | {counted} | {count['equal']} | {count['refused']} | {count['finding']} "
        f"| {overlapped} of {calls} | {max(losses, default=0):.1e} | {count['stock fails']} |"
    )


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
