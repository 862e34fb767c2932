"""Alone and beside, rehearsed without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import beside
import gpu_run
import pytest
import torch
import torch.distributed as dist
import typer
from ranks import run_ranks

from flux_megatron.bench import provenance, records, suites


def measured(rank: int, out: Path) -> None:
    """The whole backward of a layer 16 wide."""
    group, device = dist.group.WORLD, torch.device("cpu")
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    run = gpu_run.Run(group, device, about, out)
    beside.measure(run, [*beside.cases([16], 16, 2)][3:], rounds=1)


def test_layers_on_four_ranks_are_those_of_the_bench():
    ours = [*beside.cases([8192], 12288, 4)]
    bench = [suites.cases("gpt3-175b", one.pattern, (8192,), 4) for one in ours]
    assert all(one in among for one, among in zip(ours, bench, strict=True))
    assert {one.suite for one in beside.cases([8192], 12288, 2)} == {"local 12288"}


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1)])
def test_ranks_that_fail_make_it_fail(codes, tmp_path, monkeypatch):
    left = iter(codes)
    monkeypatch.setattr(
        beside.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=next(left))
    )
    with pytest.raises(typer.Exit) as end:
        beside.main(tmp_path / "rows.jsonl")
    assert end.value.exit_code == max(codes)


def test_every_candidate_alone_and_beside(tmp_path, capfd):
    run_ranks(measured, 2, tmp_path / "rows.jsonl", limit_s=280)
    rows = records.load(tmp_path / "rows.jsonl")
    found = {(row.candidate, row.beside) for row in rows if row.status == records.OK}
    assert found >= {
        (name, condition)
        for name in ("gemm", "serial", "sequential", "fused", "pipelined", "auto")
        for condition in (False, True)
    }
    assert "backward fc1 16 x 16 x 16" in capfd.readouterr().out
