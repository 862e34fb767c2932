"""The race of held-out shapes in small, and that it times no wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_run
import held_out as script
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path, beside: bool) -> list[bool]:
    return [script.measure(_run(out), case, 2, beside) for case in script.SMALL.split(",")]


@pytest.mark.parametrize("beside", [False, True])
def test_rows_of_all_plans(tmp_path, beside):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out, beside) == [[True, True]] * 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for case in script.SMALL.split(","):
        of_case = {row["plan"]: row for row in rows if row["case"] == case}
        assert {"gemm", "serial", "auto"} < of_case.keys()
        strategies = {json.loads(plan)["strategy"] for plan in of_case if plan.startswith("{")}
        assert {"sequential", "fused", "low_latency"} <= strategies
        assert of_case["gemm"]["E"] == 1
        assert of_case["serial"]["E"] == 0
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)


def broken(rank: int, case: str) -> bool:
    right = script.Layer.call
    if rank == 1:  # on one rank, and all stop
        script.Layer.call = lambda self, plan: right(self, plan) + 1
    return script.measure(_run(), case, 1, False)


@pytest.mark.parametrize("case", script.SMALL.split(","))
def test_a_wrong_result_is_not_timed(case):
    assert run_ranks(broken, 2, case) == [False, False]
