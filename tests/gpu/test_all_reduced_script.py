"""Layers without sequence parallelism, rehearsed without a GPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import all_reduced as script
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance, records, suites
from flux_megatron.bench.options import Options


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> None:
    fc1 = suites.cases("llama2-70b", "backward_ar", (32,), 2, 512)[-1]
    asked = Options((), (), (), "", ("fused", "sequential", "auto"), 1, 2, "cpu", graphs=True)
    script.measure(_run(out), fc1, asked)


def test_every_candidate_has_rows(tmp_path, capfd):
    run_ranks(measured, 2, tmp_path / "rows.jsonl")
    rows = records.load(tmp_path / "rows.jsonl")
    names = {"serial", "serial_again", "megatron", "fused", "sequential", "auto"}
    assert {row.candidate for row in rows if row.status == records.OK} == {"gemm", *names}
    refused = {row.candidate: row.reason for row in rows if row.status != records.OK}
    assert refused == dict.fromkeys((f"{name}_graph" for name in names), "CUDA graphs need a GPU")
    assert {(row.M, row.N_local, row.K_local) for row in rows} == {(32, 56, 16)}
    assert "backward_ar fc1 32 x 56 x 16 nn" in capfd.readouterr().out


def verified(rank: int, stale: bool) -> bool:
    right, kept = script.Layers.step, []

    def step(layers: script.Layers) -> tuple[torch.Tensor, ...]:
        y, *others = right(layers)
        kept.append(y)
        return (kept[0] if stale and rank == 1 else y), *others

    with mock.patch.object(script.Layers, "step", step):
        return script.verify(_run())


def test_a_result_of_an_earlier_call_ends_the_run(capfd):
    assert run_ranks(verified, 2, False) == [True, True]
    assert "fused eager: exact" in capfd.readouterr().out
    assert run_ranks(verified, 2, True) == [False, False]
    assert "fused eager: WRONG" in capfd.readouterr().out
