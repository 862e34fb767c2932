"""The measurement of Embedding + All-to-All in small, and that it measures no wrong result."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import embedding_a2a as script
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance
from flux_megatron.embedding import operation


def _run(out: Path | None = None) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def measured(rank: int, out: Path) -> str:
    for case in script.SMALL:
        script.measure(case, _run(out), 2, script.NAMES, graphs=False)
    return "".join(script.wrong(case, _run(), 2, graphs=False) for case in script.SMALL)


def test_rows_of_all_candidates(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(measured, 2, out) == ["", ""]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    seen = [(row["dtype"], row["direction"], row["candidate"]) for row in rows]
    assert seen == [*product(("float32", "bfloat16"), ("forward", "backward"), script.NAMES)]


def broken(rank: int) -> str:
    pooled = operation.fused_bags.forward

    def halved(*given):
        return pooled(*given) / 2

    operation.fused_bags.forward = halved
    return script.wrong(script.SMALL[0], _run(), 1, graphs=False)


def test_a_wrong_result_is_reported():
    for said in run_ranks(broken, 2):
        assert "elements are wrong" in said
