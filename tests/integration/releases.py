"""The releases of Megatron-LM that docs/support.md names, and what ran with each.

python tests/integration/releases.py run CHECKOUT ...   # tests/integration; appends rows
python tests/integration/releases.py page               # renews the table
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from flux_megatron.patching.series import supported  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
RESULTS = ROOT / "docs" / "results" / "cpu"
ROWS = RESULTS / "integration.jsonl"
START, END = "<!-- releases -->\n", "\n<!-- end of releases -->"
HEAD = (
    "| patches | megatron.core calls itself | `tests/integration` | random launches beside stock "
    "| Megatron's own tests, with ours |",
    "| --- | --- | --- | --- | --- |",
)
LIMIT_S = 3600
# Megatron's own tests have a command of their own
LEFT_OUT = ("test_mcore_suite.py",)


def run(checkout: Path, rows: Path = ROWS) -> dict[str, Any]:
    """`tests/integration` with a checkout in place of the installed package: a row."""
    paths = [str(checkout.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    left_out = [f"--ignore=tests/integration/{name}" for name in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration"]
    done = subprocess.run([*command, *left_out], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=LIMIT_S)  # fmt: skip
    print(done.stdout[-3000:])
    row = {"table": "integration", "release": checkout.name, **counts(done.stdout), **_where()}
    with rows.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    return row


def counts(output: str) -> dict[str, int]:
    """What the last line of pytest's output counts."""
    last = output.strip().splitlines()[-1]
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    return {what: found.get(what, 0) for what in ("passed", "failed", "skipped", "error")}


def table() -> str:
    return "\n".join((*HEAD, *_rows()))


def _rows() -> Iterator[str]:
    tested = {row["release"]: row for row in _read(ROWS)}  # the latest
    launched, suite = _read(RESULTS / "differential.jsonl"), _read(RESULTS / "mcore_suite.jsonl")
    for series in supported():
        name = series.folder.name
        cells = (
            f"`{name}`",
            series.version,
            _tested(tested.get(name)),
            _launched([row for row in launched if row["release"] == name]),
            _suite([row for row in suite if row["release"] == name]),
        )
        yield f"| {' | '.join(cells)} |"


def _tested(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    bad = row["failed"] + row["error"]
    return f"{row['passed']} pass" + (f", {bad} fail" if bad else "")


def _launched(rows: list[dict[str, Any]]) -> str:
    count = Counter(row["outcome"] for row in rows)
    names = ("equal", "refused", "finding")
    return ", ".join(f"{count[name]} {name}" for name in names if count[name])


def _suite(rows: list[dict[str, Any]]) -> str:
    ours, stock = (sum(row[key] for row in rows) for key in ("ours", "stock"))
    return f"{ours} of {stock} that pass with stock" if rows else ""


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _where() -> dict[str, str]:
    import torch

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True,
                         capture_output=True, check=True)  # fmt: skip
    return {
        "python": platform.python_version(), "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "git": git.stdout.strip(),
    }  # fmt: skip


def main(words: list[str]) -> int:
    if words[:1] == ["run"] and len(words) > 1:
        rows = [run(Path(word)) for word in words[1:]]
        return int(any(row["failed"] or row["error"] for row in rows))
    if words == ["page"]:
        before, rest = PAGE.read_text().split(START)
        PAGE.write_text(before + START + table() + END + rest.split(END)[1])
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
