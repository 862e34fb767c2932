"""The measurement of the tutorial's kernel in small, and that it measures no wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_run
import own_kernel_speed as script
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), script.DTYPE, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> bool:
    return script.measure(script.SMALL[0], _run(out), 2)


def test_rows_of_all_candidates(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out) == [True, True]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["library", *(f"triton {elements}" for elements in script.BLOCKS)]
    assert [row["candidate"] for row in rows] == names
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)


def broken(rank: int) -> bool:
    right = script.own_kernel.all_gather_rms_norm
    if rank == 1:  # on one rank, and all stop
        script.own_kernel.all_gather_rms_norm = lambda *given: right(*given) / 2
    return script.measure(script.SMALL[0], _run(), 1)


def test_a_wrong_result_is_not_measured():
    assert run_ranks(broken, 2) == [False, False]
