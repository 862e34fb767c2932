"""Compiled layers beside torch's, rehearsed without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import compiled_layers as script
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance

PLAIN = {"FLUX_MEGATRON_STRATEGY": "sequential"}


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> str:
    return script.measure(_run(out), 4, 1)


def test_every_arm_has_a_row(tmp_path, capfd):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out, environment=PLAIN, limit_s=300) == ["", ""]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    arms = [f"{who}_{how}" for who in ("ours", "torch") for how in ("eager", "compiled")]
    assert [(row["arm"], row["status"]) for row in rows] == [(arm, "ok") for arm in arms]
    assert [row["graphs"] for row in rows] == [0, 1, 0, 1]
    assert "ours_compiled" in capfd.readouterr().out


def verified(rank: int) -> str:
    run = _run()
    eager = {name: block for name, block in script.arms(run).items() if "eager" in name}
    right, kept = script.Step.run, []

    def stale(step: script.Step, block: script.Block) -> tuple[torch.Tensor, ...]:
        y, *others = right(step, block)
        kept.append(y)
        return (kept[1] if block is eager["torch_eager"] and rank == 1 else y), *others

    with mock.patch.object(script.Step, "run", stale):
        return script.verify(run, script.Step(run, 4), eager)


def test_a_result_of_an_earlier_step_is_named():
    assert run_ranks(verified, 2, environment=PLAIN) == ["torch_eager"] * 2
