"""The measuring of `signalled`, rehearsed without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import gpu_run
import signalled as script
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def rehearsed(rank: int, out: Path, broken: bool = False) -> int:
    group, device = dist.group.WORLD, torch.device("cpu")
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    run = gpu_run.Run(group, device, about, out)
    right = script.Operands.serial
    with mock.patch.object(script.Operands, "serial", lambda given: right(given) + broken):
        return script.everything(run, rounds=1)


def test_exact_curves_and_races(tmp_path, capfd):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(rehearsed, 2, out, limit_s=100) == [0, 0]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["table"] for row in rows} == {"signalled exact", "signalled curve", "signalled"}
    assert all(row["wrong"] == 0 for row in rows if row["table"] == "signalled exact")
    timed = [row for row in rows if row["table"] == "signalled"]
    assert {row["candidate"] for row in timed} >= {
        "gemm",
        "serial",
        "4 groups, 0 SMs",
        "by the facts",
        "fused",
    }
    assert all(row["predicted_us"] for row in timed if '"signalled"' in (row["plan"] or ""))
    assert "every grouping is exact" in capfd.readouterr().out


def test_what_is_wrong_ends_the_run(tmp_path, capfd):
    assert run_ranks(rehearsed, 2, tmp_path / "rows.jsonl", True, limit_s=100) == [1, 1]
    assert "WRONG" in capfd.readouterr().out
