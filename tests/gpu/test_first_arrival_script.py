"""The race of AG+GEMM's plans in small, and that it times no wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import first_arrival as script
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> list[bool]:
    return [script.measure(_run(out), shape, 2) for shape in script.SMALL.split(",")]


def test_rows_of_all_plans(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out) == [[True, True]] * 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 4  # on a CPU there is a reason in place of the plans
    assert {"gemm", "serial", "auto"} < {row["plan"] for row in rows}
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)


def broken(rank: int) -> bool:
    right = script.Layer.call
    if rank == 1:  # on one rank, and all stop
        script.Layer.call = lambda self, plan: right(self, plan) + 1
    return script.measure(_run(), "4x6x8 nt", 1)


def test_a_wrong_result_is_not_timed():
    assert run_ranks(broken, 2) == [False, False]
