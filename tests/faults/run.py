"""`python tests/faults/run.py --out docs/results/cpu/faults.jsonl`: a row for each fault.

Seeded: try n of a fault draws the same numbers each time, though not the same moments of a machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOUND_S = 5.0
CPU_ONLY = {"a full shared memory"}  # where the operands are; on GPUs a group can do without


def prepare(device: str) -> None:
    """Set up this process, before any import of ours: its forks need not import anything."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from forked_processes import import_what_ranks_import

        import_what_ranks_import()


def rows(names: list[str], tries: int, device: str, bound_s: float, seed: int, folder: Path):
    """One row a fault, as the faults are done."""
    import fault_case
    import torch
    from fault_kinds import FAULTS
    from forked_processes import kept

    world = fault_case.World(folder, device, bound_s)
    world.seconds = kept(world.prepare)
    everywhere = [name for name in FAULTS if device == "cpu" or name not in CPU_ONLY]
    for name in names or everywhere:
        ends = [try_once(world, name, f"{seed}/{number}") for number in range(tries)]
        for end in ends:
            if end.wrong:
                print(f"{name}: {end.wrong}", file=sys.stderr)
        errors = Counter(error for end in ends for error in end.errors)
        yield {
            "table": "faults",
            "fault": name,
            "runs": len(ends),
            "ended": sum(end.ended for end in ends),
            "named": sum(end.named and not end.wrong for end in ends),
            "longest_s": round(max(end.seconds for end in ends), 1),
            "bound_s": bound_s,
            "orphans": sum(end.orphans for end in ends),
            "leftovers": sum(end.leftovers for end in ends),
            "errors": dict(errors.most_common()),
            "ranks": fault_case.RANKS,
            "device": device,
            "seed": seed,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }


def try_once(world, name: str, seed: str):
    """One end of that fault; tries whose job was over before the fault came are drawn again."""
    from fault_kinds import FAULTS
    from forked_processes import kept

    for again in range(20):
        folder = world.folder / "tries" / f"{time.monotonic_ns()}"
        try:
            return kept(once, FAULTS[name], folder, f"{name}/{seed}/{again}", world)
        except AssertionError as error:
            if "Ended" not in str(error).strip().splitlines()[-1]:
                raise
    raise RuntimeError(f"{name}: 20 jobs were over before the fault came")


def once(body, folder: Path, seed: str, world):
    import fault_case

    return body(fault_case.Case(folder, seed, world))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="FLUX_MEGATRON_TIMEOUT_S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", action="append", default=[], help="only these")
    options = parser.parse_args()
    prepare(options.device)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for row in rows(
            options.fault, options.tries, options.device, options.bound, options.seed, Path(folder)
        ):
            with options.out.open("a") as stream:
                stream.write(json.dumps(row | {"git": commit}) + "\n")
            good = row["runs"] == row["ended"] == row["named"]
            bad += not (good and row["orphans"] == row["leftovers"] == 0)
            print(json.dumps(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main())
