"""The measuring of decoding, rehearsed without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import generate as script
import gpu_run
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance
from flux_megatron.integration.layers import FluxRowParallelLinear


def rehearsed(rank: int, out: Path, sign: int = 1) -> int:
    group, device = dist.group.WORLD, torch.device("cpu")
    about = provenance.describe(device, group.size(), torch.bfloat16, 1, False, "none")
    forward = FluxRowParallelLinear.forward

    def signed(self, x):
        y, bias = forward(self, x)
        return sign * y, bias

    with mock.patch.object(FluxRowParallelLinear, "forward", signed):
        return script.everything(gpu_run.Run(group, device, about, out), (3,), rounds=1, steps=2)


def test_rows_of_both_arms(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert run_ranks(rehearsed, 2, out) == [0, 0]
    tokens, *timed = [json.loads(line) for line in out.read_text().splitlines()]
    assert (tokens["wrong"], tokens["batch"]) == (0, 3)
    assert set(tokens["calls"]) >= {"gemm_ar low_latency"}
    assert [row["arm"] for row in timed] == ["flux", "stock"]
    assert all(row["ms_per_token"] > 0 and row["commit"] == "none" for row in timed)


def test_other_logits_end_the_run(tmp_path):
    assert run_ranks(rehearsed, 2, tmp_path / "rows.jsonl", -1) == [1, 1]
