"""docs/support.md: its tables of features and of releases of Megatron-LM, and what ran with each.

python tests/integration/support_page.py [CHECKOUT ...]

renews them; before that it runs tests/integration with each checkout, and appends a row.
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
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from training_cases import FEATURES  # noqa: E402
from training_run import Feature  # noqa: E402

from flux_megatron.patching.series import supported  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
RESULTS = ROOT / "docs" / "results" / "cpu"
ROWS = RESULTS / "integration.jsonl"
LIMIT_S = 3600
# Megatron's own tests have a command of their own
LEFT_OUT = "--ignore=tests/integration/test_mcore_suite.py"


def features() -> Iterator[str]:
    """A line for each kind of run, so that a reader finds a feature and not its repetitions."""
    kinds: dict[str, list[str]] = {}
    for name, feature in FEATURES.items():
        kinds.setdefault(_kind(feature), []).append(name)
    yield "| TP x PP x DP, dtype | features |"
    yield "| --- | --- |"
    for kind, names in kinds.items():
        yield f"| {kind} | {'; '.join(names)} |"


def _kind(feature: Feature) -> str:
    dtype = str(feature.dtype).removeprefix("torch.")
    why = "" if feature.runs == "overlapped" else f"; not by `pipelined`: {feature.runs}"
    return f"{feature.tp} x {feature.pp} x {feature.dp}, {dtype}{why}"


def releases() -> Iterator[str]:
    yield (
        "| release | `tests/integration` | random launches beside stock | "
        "Megatron's own tests: pass with ours, of stock's |"
    )
    yield "| --- | --- | --- | --- |"
    for series in supported():
        tested, launched, suite = (
            [row for row in _read(table) if row["release"] == series.folder.name]
            for table in ("integration", "differential", "mcore_suite")
        )
        count = Counter(row["outcome"] for row in launched)
        outcomes = [f"{count[o]} {o}" for o in ("equal", "refused", "finding") if count[o]]
        ours, stock = (sum(row[key] for row in suite) for key in ("ours", "stock"))
        cells = (
            f"`{series.folder.name}`",
            _tested(tested[-1]) if tested else "",  # the latest
            ", ".join(outcomes),
            f"{ours} of {stock}" if suite else "",
        )
        yield f"| {' | '.join(cells)} |"


def _tested(row: dict[str, Any]) -> str:
    bad = row["failed"] + row["error"]
    return f"{row['passed']} pass" + (f", {bad} fail" if bad else "")


def _read(table: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{table}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def renewed(page: str) -> str:
    for name, lines in (("features", features()), ("releases", releases())):
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + "\n".join(lines) + end + rest.split(end)[1]
    return page


def run(checkout: Path) -> bool:
    """`tests/integration` with a checkout in place of the installed package: whether all pass."""
    import torch

    paths = [str(checkout.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration"]
    done = subprocess.run([*command, LEFT_OUT], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=LIMIT_S)  # fmt: skip
    print(done.stdout[-3000:])
    last = done.stdout.strip().splitlines()[-1]
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True,
                         capture_output=True, check=True)  # fmt: skip
    row = {
        "table": "integration", "release": checkout.name,
        **{what: found.get(what, 0) for what in ("passed", "failed", "skipped", "error")},
        "python": platform.python_version(), "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "git": git.stdout.strip(),
    }  # fmt: skip
    with ROWS.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    return not (row["failed"] or row["error"])


if __name__ == "__main__":
    passed = [run(Path(word)) for word in sys.argv[1:]]
    PAGE.write_text(renewed(PAGE.read_text()))
    sys.exit(not all(passed))
