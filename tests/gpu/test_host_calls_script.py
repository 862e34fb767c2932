"""The clock around calls of each strategy in small, and that it times no wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_run
import host_calls as script
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> list[bool]:
    run = _run(out)
    layer = script.Layer(run)
    script.host_speed(run, layer, 1)
    with script.engine(run, "python"):
        return [
            layer.runs(name) and script.measure(run, layer, "python", name, 1)
            for name in script.STRATEGIES
        ]


def test_a_row_for_each_call_of_each_strategy(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "BATCH", 2)
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out) == [[False, True, True, True]] * 2, "no Hopper GPU here"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 + 3 * 6
    assert all(row["median_us"] > 0 for row in rows)
    assert all(row["exact"] for row in rows if row["strategy"] != "none")


def broken(rank: int) -> bool:
    run = _run()
    layer = script.Layer(run)
    if rank == 1:  # on one rank, and all stop
        layer.y = layer.y + 1
    assert layer.runs("sequential")
    return script.measure(run, layer, "python", "sequential", 1)


def test_a_wrong_result_is_noticed():
    assert run_ranks(broken, 2) == [False, False]
