"""`python tests/differential/run.py --megatron CHECKOUT ... --count 300 --seed 1 --out rows.jsonl`

Random valid arguments of the unedited pretrain_gpt.py, five iterations on CPU: stock layers beside
ours. A row for each combination; exits 1 if one is a finding. docs/testing.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, nargs="+", required=True, metavar="CHECKOUT",
                        help="folders named as in flux_megatron/launch/signatures")  # fmt: skip
    parser.add_argument("--count", type=int, default=300, help="that stock can run, over all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first combination")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--site", type=Path, help="folder of packages that pretrain_gpt.py needs")
    parser.add_argument("--limit", type=float, default=60, help="seconds of one run")
    parser.add_argument("--break", dest="broken", help="a break of training_breaks.py, for our arm")
    parser.add_argument("--keep", type=Path, help="folder for the logs of findings")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    from outcomes import table
    from trial import Trial

    rows, when = [], _when()
    for share, checkout in enumerate(options.megatron):
        wanted = [*range(options.count)][share :: len(options.megatron)]
        with tempfile.TemporaryDirectory(dir=_memory(), prefix="differential-") as folder:
            trial = Trial(checkout.resolve(), options, Path(folder))
            number, counted = options.first, 0
            while counted < len(wanted):
                row = trial.row(number) | when
                number += 1
                counted += row["outcome"] != "stock fails"
                rows.append(row)
                with options.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                print(row["release"], row["number"], row["outcome"], row["why"], flush=True)
            trial.close()
    print(table(rows))
    return int(any(row["outcome"] == "finding" for row in rows))


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
