"""`flux-megatron bench operations` in small: rows of all candidates, no time for a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bench_run import rows_of, run_here
from races import agreed
from ranks import DEVICE, on_cpu_ranks, run_ranks

from flux_megatron.embedding import operation
from flux_megatron.expert_parallel import call, fused, ops
from flux_megatron.kernels.experts import token_call
from flux_megatron.lab.bench import operations
from flux_megatron.lab.bench.operations import (
    embedding_all_to_all,
    expert_all_to_all,
    expert_layers,
)
from flux_megatron.lab.bench.operations.expert_all_to_all import SMALL, Work
from flux_megatron.lab.bench.options import OperationOptions

# with a GPU the kernels are compiled in this process, and do not take tensors of the CPU
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")


def measured(rank: int, name: str, out: Path) -> None:
    options = OperationOptions((name,), out=str(out), rounds=2, device="cpu")
    operations.measure_all(options, run_here(out))


def refused(rank: int, name: str, out: Path) -> str:
    """Why no rank has measured an operation; the same on all."""
    with pytest.raises(ArithmeticError) as error:
        measured(rank, name, out)
    assert not out.exists()
    return agreed(str(error.value))


@pytest.fixture
def rows(tmp_path):
    """Rows of an operation."""

    def run(name: str) -> list[SimpleNamespace]:
        run_ranks(measured, 2, name, tmp_path / "rows.jsonl")
        return rows_of(tmp_path / "rows.jsonl")

    return run


def test_rows_of_embeddings(rows):
    found = rows("embedding_all_to_all")
    seen = [(row.dtype, row.direction, row.candidate) for row in found]
    dtypes, directions = ("float32", "bfloat16"), ("forward", "backward")
    assert seen == [*product(dtypes, directions, embedding_all_to_all.NAMES)]
    assert all(row.median_us > 0 and len(row.times_us) == 2 for row in found)
    assert {row.commit for row in found} == {"none"}


@on_cpu_ranks(2)
def test_a_wrong_embedding_has_no_times(rank, tmp_path):
    """Results are wrong on rank 1."""
    pooled = operation.fused_bags.forward
    operation.fused_bags.forward = lambda *given: pooled(*given) / (2 if rank == 1 else 1)
    said = refused(rank, "embedding_all_to_all", tmp_path / "rows.jsonl")
    assert "fused, call 0: rank 1: ArithmeticError: " in said
    assert "elements of y are wrong" in said


def rows_by(rank: int, measure: Callable[..., object], sizes: object) -> list[dict]:
    run, rows = run_here(), []
    run.row = lambda table, **values: rows.append({"table": table, **values})
    measure(run, sizes, 2)
    return rows


def test_rows_of_all_candidates():
    ours = {"fused", "signalled", "sequential"}
    forward = ours | {"nccl", "nccl + sync", "gemm", "own gemm", "a2a"}
    backward = ours | {"nccl", "gemm", "wgrad", "own wgrad", "a2a"}
    names = {
        "a2a_gemm": forward, "gemm_a2a": forward,
        "a2a_gemm backward": backward, "gemm_a2a backward": backward,
    }  # fmt: skip
    for rows in run_ranks(rows_by, 2, expert_all_to_all.measure, replace(SMALL[0], tokens=8)):
        assert [row["operation"] for row in rows] == [*names]
        for row in rows:
            assert (row["table"], row["skew"]) == ("expert_parallel", 0.33)
            assert row["times_us"].keys() == names[row["operation"]]
            assert row["plans"].keys() == ours
            assert not row["failures"]


def test_rows_of_whole_layers_of_experts():
    names = ["once", "by expert", "nccl", "nccl + sync", "by expert, sorted"]
    for rows in run_ranks(rows_by, 2, expert_layers.measure, expert_layers.SMALL[0]):
        assert [row["direction"] for row in rows] == ["forward", "backward"]
        assert [*rows[0]["times_us"]] == names
        assert [*rows[1]["times_us"]] == [name for name in names if name != "nccl + sync"]
        assert not any(row["failures"] for row in rows)


@on_cpu_ranks(2)
def test_wrong_sums_are_not_of_layers(rank):
    made = token_call.give_back
    token_call.give_back = lambda *given: made(*given) + rank
    with pytest.raises(ArithmeticError, match=r"once, .*rank 1: .*elements of y are wrong"):
        expert_layers.measure(run_here(), expert_layers.SMALL[0], 1)


@on_cpu_ranks(2)
def test_layers_of_experts_are_alike_but_for_rounding(rank):
    work = expert_layers.Work(expert_layers.SMALL[0], run_here())
    y, *others = (layer() for name, layer in work.forward().items() if "sorted" not in name)
    for other in others:
        torch.testing.assert_close(other, y)


@on_cpu_ranks(2)
def test_the_baseline_of_known_splits_computes_what_the_verified_one_does(rank):
    work = Work(replace(SMALL[0], tokens=8), run_here())
    verified = work.expected()
    work.fetched = work.known
    torch.testing.assert_close(work.expected(), verified, rtol=0, atol=0)


@on_cpu_ranks(2)
def test_a_wrong_gradient_is_not_of_experts(rank):
    made = ops.weight_gradient
    ops.weight_gradient = lambda *rows: made(*rows) + 1
    with pytest.raises(ArithmeticError, match="elements of dw are wrong"):
        expert_all_to_all.measure(run_here(), SMALL[0], 1)


@on_cpu_ranks(2)
def test_a_wrong_result_is_not_of_experts(rank, tmp_path):
    """Rows of rank 1's kernel are wrong, so no rank times anything."""
    made = fused.a2a_gemm_kernels.a2a_gemm
    fused.a2a_gemm_kernels.a2a_gemm = lambda *operands, **more: made(*operands, **more) + rank
    said = refused(rank, "expert_all_to_all", tmp_path / "rows.jsonl")
    assert said.startswith(f"expert_all_to_all, {SMALL[0]}: fused, call 0: ")
    assert "elements of hidden are wrong" in said.partition("rank 1: ")[2]


@pytest.mark.parametrize("wrong", ["signalled", "sequential"])
@on_cpu_ranks(2)
def test_every_strategy_is_verified(rank, wrong):
    strategy = call.STRATEGIES[wrong]
    right = strategy.gemm_a2a
    with (
        mock.patch.object(strategy, "gemm_a2a", lambda *given: right(*given) + 1),
        pytest.raises(ArithmeticError, match=f"{wrong}, .*elements of y are wrong"),
    ):
        expert_all_to_all.measure(run_here(), SMALL[0], 1)
