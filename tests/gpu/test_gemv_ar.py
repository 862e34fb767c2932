"""The script of few rows in small; it is meant for GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import gemv_ar
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def _run(out: Path) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.bfloat16, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> int:
    run = _run(out)
    wrong = gemv_ar.verify(run, 6)
    *_, last = gemv_ar.cases(run)
    with mock.patch.object(gemv_ar, "CALLS", 1):
        gemv_ar.measure(run, last, 2, variants=False)
    return wrong


def shifted(rank: int) -> int:
    """One result of rank 1 is off by one."""
    run, results = _run(Path("/dev/null")), []
    call = gemv_ar.ops.gemm_all_reduce

    def off_by_one(*given, **options):
        results.append(call(*given, **options))
        return results[-1] + (rank == 1 and len(results) == 3)

    with mock.patch.object(gemv_ar.ops, "gemm_all_reduce", off_by_one):
        return gemv_ar.verify(run, 6)


def test_rows_of_every_candidate(tmp_path):
    assert run_ranks(measured, 2, tmp_path / "rows.jsonl") == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = [row["candidate"].split()[0] for row in rows]
    assert names == ["mm", "mm", "low_latency"]
    assert all(row["us"] > 0 and row["commit"] == "none" for row in rows)


def test_a_wrong_result_is_counted_on_all_ranks():
    first, second = run_ranks(shifted, 2)
    assert first == second > 0
