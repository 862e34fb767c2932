"""`python tests/differential/run.py --megatron CHECKOUT ... --count 300 --seed 1 --out rows.jsonl`

Random valid arguments of the unedited pretrain_gpt.py, five iterations on CPU: stock layers beside
ours. A row for each combination. Exits 1 if one is a finding, or if too few were compared.
docs/tests.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
OUTCOMES = ("equal", "refused", "finding")
FEW = 5  # of a release, beside a half: combinations that need not have been compared


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, nargs="+", required=True, metavar="CHECKOUT",
                        help="named as the releases in integration/signatures.tsv")  # fmt: skip
    parser.add_argument("--count", type=int, default=300, help="that stock can run, over all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first combination")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--site", type=Path, help="folder of packages that pretrain_gpt.py needs")
    parser.add_argument("--limit", type=float, default=60, help="seconds of one run")
    parser.add_argument("--keep", type=Path, help="folder for the logs of findings")
    options = parser.parse_args(arguments)
    if options.count < len(options.megatron):
        parser.error(f"--count {options.count} given, one or more of each --megatron expected")
    return options


def main(options: argparse.Namespace) -> int:
    from trial import Trial

    rows: list[dict[str, Any]] = []
    when, bad = _when(), False
    for share, checkout in enumerate(options.megatron):
        wanted = [*range(options.count)][share :: len(options.megatron)]
        with tempfile.TemporaryDirectory(dir=_memory(), prefix="differential-") as folder:
            trial = Trial(checkout.resolve(), options, Path(folder))
            here: list[dict[str, Any]] = []
            while _left(here, len(wanted)):
                row = trial.row(options.first + len(here)) | when
                here.append(row)
                with options.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                print(row["release"], row["number"], row["outcome"], row["why"], flush=True)
            trial.close()
        rows += here
        if uncompared(here):
            few = f"more than half and {FEW} of {len(here)} draws were not compared"
            print(f"{checkout.name}: {few}: this shows nothing")
            bad = True
    print(table(rows))
    return int(bad or any(row["outcome"] == "finding" for row in rows))


def _left(rows: list[dict[str, Any]], wanted: int) -> bool:
    """Whether more is to be drawn: what stock cannot run does not count, but has an end."""
    return sum(row["outcome"] != "stock fails" for row in rows) < wanted and not uncompared(rows)


def uncompared(rows: list[dict[str, Any]]) -> bool:
    """Whether so few of a release's draws had both arms run that the rest shows nothing.

    Stock fails in a quarter of all draws, and ours refuses one in thirty.
    """
    without = sum(row["outcome"] in ("stock fails", "refused") for row in rows)
    return without > FEW + len(rows) // 2


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


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _when() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    made_by = {"python": platform.python_version(), "torch": torch.__version__}
    return {**made_by, "date": datetime.date.today().isoformat(), "git": commit}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(parsed()))
