"""The measurement of expert parallelism in small, and that it measures nothing that is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, on_cpu_ranks, run_ranks

from flux_megatron.expert_parallel import call, fused, ops
from flux_megatron.lab.bench import provenance
from flux_megatron.lab.bench.operations import expert_all_to_all, worker
from flux_megatron.lab.bench.operations.expert_work import SMALL, Work
from flux_megatron.lab.bench.operations.worker import OperationOptions
from flux_megatron.lab.bench.table_run import Run

# with a GPU the kernels are compiled in this process, and do not take tensors of the CPU
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")


def _run(out: Path | None = None) -> Run:
    device = torch.device("cpu")
    about = provenance.describe(device, 2, torch.float32, 1, False, "")
    return Run(dist.group.WORLD, device, about, out)


def _measured(rank: int, rows: list) -> list[dict]:
    run = _run()
    run.row = lambda table, **values: rows.append({"table": table, **values})
    assert not expert_all_to_all.verify(run)
    expert_all_to_all.measure(run, replace(SMALL[0], tokens=8), 2)
    return rows


def test_rows_of_all_candidates():
    ours = {"fused", "signalled", "sequential"}
    forward = ours | {"nccl", "nccl + sync", "gemm", "own gemm", "a2a"}
    backward = ours | {"nccl", "gemm", "wgrad", "own wgrad", "a2a"}
    names = {
        "a2a_gemm": forward, "gemm_a2a": forward,
        "a2a_gemm backward": backward, "gemm_a2a backward": backward,
    }  # fmt: skip
    for rows in run_ranks(_measured, 2, []):
        assert [row["operation"] for row in rows] == [*names]
        for row in rows:
            assert (row["table"], row["skew"]) == ("expert_parallel", 0.33)
            assert row["times_us"].keys() == names[row["operation"]]
            assert row["plans"].keys() == ours
            assert not row["failures"]


@on_cpu_ranks(2)
def test_the_baseline_computes_the_same(rank):
    """The baseline computes what is timed beside it, backward too."""
    run = _run()
    work = Work(replace(SMALL[0], tokens=8), run)
    known, plan = work.known, work.plans["fused"]
    x, w, z, v = (one.requires_grad_() for one in (work.x, work.w, work.z, work.v))
    hidden = work.there(x, w, work.counts, plan)
    y = work.back(z, v, work.counts, len(x), plan)
    dx, dw = torch.autograd.grad(hidden, (x, w), work.dh)
    dz, dv = torch.autograd.grad(y, (z, v), work.dy)
    with torch.no_grad():
        rows = known.exchange(x, known.sent, known.received)[known.order]
        plain = {
            "hidden": (hidden[: work.came], known.a2a_gemm(x, w)),
            "y": (y, known.gemm_a2a(z, v)),
        }
        right_dx, right_dw = known.a2a_gemm_backward(work.dh[: work.came], w, rows)
        right_dz, right_dv = known.gemm_a2a_backward(work.dy, v, z[: work.came])
    plain |= {"dx": (dx, right_dx), "dw": (dw, right_dw)}
    plain |= {"dz": (dz[: work.came], right_dz), "dv": (dv, right_dv)}
    for name, (ours, right) in plain.items():
        torch.testing.assert_close(ours, right, msg=lambda text, name=name: f"{name}: {text}")


@on_cpu_ranks(2)
def test_a_wrong_gradient_is_not_measured(rank):
    made = ops.weight_gradient
    ops.weight_gradient = lambda *rows: made(*rows) + 1
    text = expert_all_to_all.verify(_run())
    assert "elements of dw are wrong" in text


@on_cpu_ranks(2)
def test_a_wrong_result_is_not_measured(rank, tmp_path):
    """Rows of rank 1's kernel are wrong, so no rank times anything."""
    out = tmp_path / "rows.jsonl"
    made = fused.a2a_gemm_kernels.a2a_gemm
    fused.a2a_gemm_kernels.a2a_gemm = lambda *operands, **more: made(*operands, **more) + rank
    options = OperationOptions(("expert_all_to_all",), str(out), device="cpu")
    with pytest.raises(ArithmeticError) as error:
        worker.measure(_run(out), options)
    assert str(error.value).startswith("expert_all_to_all: fused, 3 experts of 24 x 16: ")
    assert "elements of hidden are wrong on rank 1" in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize("wrong", ["signalled", "sequential"])
@on_cpu_ranks(2)
def test_every_strategy_is_verified(rank, wrong):
    strategy = call.STRATEGIES[wrong]
    right = strategy.gemm_a2a
    with mock.patch.object(strategy, "gemm_a2a", lambda *given: right(*given) + 1):
        text = expert_all_to_all.verify(_run())
    assert text.startswith(wrong)
    assert "elements of y are wrong" in text
