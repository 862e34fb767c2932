"""The measurement of expert parallelism in small, and that it measures nothing that is wrong."""

from __future__ import annotations

import expert_parallel
import pytest
import torch
import torch.distributed as dist
from gpu_run import Run
from ranks import run_ranks

from flux_megatron.bench import provenance
from flux_megatron.expert_parallel import fused


def _run() -> Run:
    device = torch.device("cpu")
    return Run(
        dist.group.WORLD, device, provenance.describe(device, 2, torch.float32, 1, False, "")
    )


def _measured(rank: int, rows: list) -> list[dict]:
    run = _run()
    run.row = lambda table, **values: rows.append(values)
    expert_parallel.verify(run, 24, 16, 3, 20, 3)
    expert_parallel.measure(run, expert_parallel.TINY[0], 8, 0.33, rounds=2)
    return rows


def test_rows_of_all_candidates():
    for rows in run_ranks(_measured, 2, []):
        assert [row["operation"] for row in rows] == ["a2a_gemm", "gemm_a2a"]
        for row in rows:
            assert row["times_us"].keys() == {"fused", "nccl", "nccl + sync", "gemm", "a2a"}
            assert not row["failures"]


def _wrong(rank: int) -> None:
    made = fused.a2a_gemm_kernels.a2a_gemm
    fused.a2a_gemm_kernels.a2a_gemm = lambda *operands, **more: made(*operands, **more) + 1
    with pytest.raises(AssertionError, match="elements of hidden are wrong"):
        expert_parallel.verify(_run(), 24, 16, 3, 20, 1)


def test_a_wrong_result_is_not_measured():
    run_ranks(_wrong, 2)
