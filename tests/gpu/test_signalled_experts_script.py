"""The measurement of `signalled` experts in small, and that it measures nothing that is wrong."""

from __future__ import annotations

from unittest import mock

import pytest
import signalled_experts as script
import torch
import torch.distributed as dist
from gpu_run import Run
from ranks import run_ranks

from flux_megatron.bench import provenance
from flux_megatron.expert_parallel import signalled


def _run() -> Run:
    device = torch.device("cpu")
    return Run(
        dist.group.WORLD, device, provenance.describe(device, 2, torch.float32, 1, False, "")
    )


def _measured(rank: int) -> list[dict]:
    run, rows = _run(), []
    run.row = lambda table, **values: rows.append(values)
    script.verify(run, (24, 16, 3, 20), 2, 8)
    script.measure(run, script.MODELS["cpu"][0], 0.33, rounds=1)
    return rows


def test_rows_of_all_candidates():
    names = {f"{bands} bands, {sms} SMs" for bands, sms in script.BANDS_AND_SMS}
    names |= {"sequential", "fused", "nccl", "nccl + sync", "gemm", "a2a", "a2a, 8 SMs"}
    for rows in run_ranks(_measured, 2):
        assert [row["operation"] for row in rows] == ["a2a_gemm", "gemm_a2a"]
        for row in rows:
            assert row["times_us"].keys() == names
            assert not row["failures"]


def _wrong(rank: int) -> None:
    right = signalled.signalled_experts

    def one_more(home, far, near, w, *table, **more) -> None:
        other = w._replace(matrices=w.matrices + 1)
        right(home, far, near, other, *table, **more)

    with (
        mock.patch.object(signalled, "signalled_experts", one_more),
        pytest.raises(AssertionError, match="elements of hidden are wrong"),
    ):
        script.verify(_run(), (24, 16, 3, 20), 2, 8)


def test_a_wrong_result_is_not_measured():
    run_ranks(_wrong, 2)
