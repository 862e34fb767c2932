"""Operations alone, and beside a running NCCL all-reduce: what a training run will see of them.

    python tests/gpu/beside.py beside.jsonl --tp 4

One layer of each kind, forward and backward, `--width` wide on each rank, at every M; with
CUDA_DEVICE_MAX_CONNECTIONS unset and 1. The bench measures both conditions (`docs/measuring.md`):
its baselines of GEMMs and NCCL, and every strategy in its default plan, in one race each. Prints
us and E of each, alone and beside; `!` where the all-reduce ended before the call in some round.
The rows are the bench's: `flux-megatron bench check` and `plot` read them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import gpu_run
import torch
import typer
from gpu_run import Run

from flux_megatron.bench import records, runner, suites
from flux_megatron.bench.options import Options
from flux_megatron.bench.records import OK, Row
from flux_megatron.bench.suites import Case

CANDIDATES = ("sequential", "hopper", "fused", "pipelined", "auto")


def cases(Ms: Sequence[int], width: int, ranks: int) -> Iterator[Case]:
    """N = K = `width` on each rank; on 4 ranks those are layers of GPT-3."""
    many = ranks * width
    model = suites.MODELS["gpt3-175b"]
    suite = "gpt3-175b" if (width, many) == (model.hidden, model.ffn) else f"local {width}"
    for M in Ms:
        for pattern, op, N, K, layout in (
            ("ag_gemm", "fc1", many, width, "nt"),
            ("gemm_rs", "fc2", width, many, "nt"),
            ("backward", "fc2", width, many, "nn"),
            ("backward", "fc1", many, width, "nn"),
        ):
            yield Case(suite, pattern, op, M, N, K, layout, ranks)


def measure(run: Run, cases: Iterable[Case], rounds: int) -> None:
    """The rows of each case, alone and beside, while there is time."""
    options = Options((), (), (), "", CANDIDATES, rounds, run.group.size(), beside=True)
    dtype = getattr(torch, run.about.dtype)
    for case in cases:
        if not run.time_left():
            run.say("no time for the others")
            return
        both = [*runner.measure(case, options, run.group, run.device, dtype, {}, run.about)]
        if run.first and run.out is not None:
            records.append(run.out, [row for rows in both for row in rows])
        run.say(f"{case} connections {run.about.max_connections}, us (E) alone, beside")
        for alone, beside in zip(*both, strict=True):
            run.say(f"  {alone.candidate:14}{_cell(alone)}{_cell(beside)}")


def _cell(row: Row) -> str:
    if row.status != OK:
        return f"  {row.status}: {row.reason[:60]}"
    efficiency = "" if row.efficiency is None else f"({row.efficiency:.2f})"
    return f"{row.median_us:10.0f} {efficiency:8}{'!' if row.reason else ' '}"


def main(
    out: Path, tp: int = 4, commit: str = "",
    M: Annotated[str, typer.Option("--M")] = "8192,4096,2048,1024,512",
    connections: str = "unset,1", width: int = 12288, rounds: int = 12, seconds: float = 280,
) -> None:  # fmt: skip
    """Start the ranks, or be one of them. `seconds` are for each setting of `connections`. Exits 1
    if ranks failed.
    """
    if "RANK" in os.environ:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        run = gpu_run.start(out, commit, seconds, dtype)
        measure(run, cases([*map(int, M.split(","))], width, tp), rounds)
        gpu_run.finish(run)
    good = True
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    for setting in connections.split(","):
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": setting}
        if setting == "unset":
            del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
        ranks = subprocess.run([sys.executable, *command, *sys.argv], env=environment, check=False)
        good &= ranks.returncode == 0
    raise typer.Exit(not good)


if __name__ == "__main__":
    typer.run(main)
