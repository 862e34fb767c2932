"""The measurement of expert parallelism in small, and that it measures nothing that is wrong."""

from __future__ import annotations

import time

import expert_parallel
import pytest
import torch
import torch.distributed as dist
from gpu_run import Run
from ranks import run_ranks

from flux_megatron.bench import provenance
from flux_megatron.expert_parallel import fused, ops


def _run() -> Run:
    device = torch.device("cpu")
    return Run(
        dist.group.WORLD, device, provenance.describe(device, 2, torch.float32, 1, False, "")
    )


def _measured(rank: int, rows: list) -> list[dict]:
    run = _run()
    expert_parallel.BEGUN_S = time.monotonic()  # it was imported when this process began
    run.row = lambda table, **values: rows.append(values)
    expert_parallel.verify(run, 24, 16, 3, 20, 3)
    expert_parallel.measure(run, expert_parallel.Timed(run, expert_parallel.TINY[0], 8, 0.33), 2)
    return rows


def test_rows_of_all_candidates():
    forward = {"fused", "nccl", "nccl + sync", "gemm", "own gemm", "a2a"}
    backward = {"fused", "nccl", "gemm", "wgrad", "own wgrad", "a2a"}
    names = {
        "a2a_gemm": forward, "gemm_a2a": forward,
        "a2a_gemm backward": backward, "gemm_a2a backward": backward,
    }  # fmt: skip
    for rows in run_ranks(_measured, 2, []):
        assert [row["operation"] for row in rows] == [*names]
        for row in rows:
            assert row["times_us"].keys() == names[row["operation"]]
            assert not row["failures"]


def _same(rank: int) -> None:
    """The baseline computes what is timed beside it, backward too."""
    timed = expert_parallel.Timed(_run(), expert_parallel.TINY[0], 8, 0.33)
    known, group = timed.known, dist.group.WORLD
    x, w, z, v = (one.requires_grad_() for one in (timed.x, timed.w, timed.z, timed.v))
    hidden, _ = ops.a2a_gemm(x, w, timed.counts, group, capacity=timed.capacity)
    y = ops.gemm_a2a(z, v, timed.counts, group, tokens=timed.rows)
    dx, dw = torch.autograd.grad(hidden, (x, w), timed.dh)
    dz, dv = torch.autograd.grad(y, (z, v), timed.dy)
    with torch.no_grad():
        rows = known.exchange(x, known.sent, known.received)[known.order]
        plain = {
            "hidden": (hidden[: timed.came], known.a2a_gemm(x, w)),
            "y": (y, known.gemm_a2a(z, v)),
        }
        right_dx, right_dw = known.a2a_gemm_backward(timed.dh[: timed.came], w, rows)
        right_dz, right_dv = known.gemm_a2a_backward(timed.dy, v, z[: timed.came])
    plain |= {"dx": (dx, right_dx), "dw": (dw, right_dw)}
    plain |= {"dz": (dz[: timed.came], right_dz), "dv": (dv, right_dv)}
    for name, (ours, right) in plain.items():
        torch.testing.assert_close(ours, right, msg=lambda text, name=name: f"{name}: {text}")


def test_the_baseline_computes_the_same():
    run_ranks(_same, 2)


def _backward_is_wrong(rank: int) -> None:
    made = ops.weight_gradient
    ops.weight_gradient = lambda *rows: made(*rows) + 1
    with pytest.raises(AssertionError, match="elements of dw are wrong"):
        expert_parallel.verify(_run(), 24, 16, 3, 20, 1)


def test_a_wrong_gradient_is_not_measured():
    run_ranks(_backward_is_wrong, 2)


def _wrong(rank: int) -> None:
    made = fused.a2a_gemm_kernels.a2a_gemm
    fused.a2a_gemm_kernels.a2a_gemm = lambda *operands, **more: made(*operands, **more) + 1
    with pytest.raises(AssertionError, match="elements of hidden are wrong"):
        expert_parallel.verify(_run(), 24, 16, 3, 20, 1)


def test_a_wrong_result_is_not_measured():
    run_ranks(_wrong, 2)
