"""`flux-megatron bench operations` in small: rows of all candidates, no time for a wrong one."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, run_ranks

from flux_megatron.embedding import operation
from flux_megatron.lab.bench import provenance
from flux_megatron.lab.bench.operations import (
    embedding_all_to_all,
    gemv_all_reduce,
    gemv_verification,
    worker,
)
from flux_megatron.lab.bench.operations.worker import OperationOptions
from flux_megatron.lab.bench.table_run import Run

# with a GPU the kernels are compiled in this process, and do not take tensors of the CPU
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")


def _run(out: Path | None = None) -> Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.bfloat16, 1, False, "none")
    return Run(group, device, about, out)


def measured(rank: int, names: tuple[str, ...], out: Path) -> None:
    options = OperationOptions(names, str(out), only="", rounds=2, device="cpu")
    with (
        mock.patch.object(gemv_all_reduce, "CALLS", 1),
        mock.patch.dict(gemv_all_reduce.EPOCHS, cpu=6),
        mock.patch.dict(gemv_all_reduce.SIZES, {"one": (2048, 4096)}, clear=True),
    ):
        worker.measure(_run(out), options)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_of_few_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    run_ranks(measured, 2, ("gemv_all_reduce",), out)
    epochs, *rows = rows_of(out)
    assert (epochs["epochs"], epochs["wrong"]) == (6, 0)
    names = [(row["case"], row["M"], row["candidate"].split()[0]) for row in rows]
    cases = [("one", 1), ("one", 4), ("all-reduce alone", 6)]
    assert names == [(*case, name) for case in cases for name in ("mm", "mm", "low_latency")]
    assert all(row["us"] > 0 and len(row["times_us"]) == 2 for row in rows)
    assert {row["commit"] for row in rows} == {"none"}


def test_rows_of_embeddings(tmp_path):
    out = tmp_path / "rows.jsonl"
    run_ranks(measured, 2, ("embedding_all_to_all",), out)
    seen = [(row["dtype"], row["direction"], row["candidate"]) for row in rows_of(out)]
    dtypes, directions = ("float32", "bfloat16"), ("forward", "backward")
    assert seen == [*product(dtypes, directions, embedding_all_to_all.NAMES)]


def shifted(rank: int) -> int:
    """One result of rank 1 is off by one."""
    results = []
    call = gemv_verification.ops.gemm_all_reduce

    def off_by_one(*given, **options):
        results.append(call(*given, **options))
        return results[-1] + (rank == 1 and len(results) == 3)

    with mock.patch.object(gemv_verification.ops, "gemm_all_reduce", off_by_one):
        return gemv_verification.wrong_elements(_run(), 6)


def test_a_wrong_result_of_few_rows_is_counted_on_all_ranks():
    first, second = run_ranks(shifted, 2)
    assert first == second > 0


def halved(rank: int, out: Path) -> str:
    """Embeddings whose results are wrong on rank 1."""
    pooled = operation.fused_bags.forward

    def broken(*given):
        return pooled(*given) / (2 if rank == 1 else 1)

    operation.fused_bags.forward = broken
    with pytest.raises(ArithmeticError) as error:
        measured(rank, ("embedding_all_to_all",), out)
    return str(error.value)


def test_a_wrong_embedding_has_no_times(tmp_path):
    first, second = run_ranks(halved, 2, tmp_path / "rows.jsonl")
    assert first == "embedding_all_to_all: wrong on another rank"
    assert "elements are wrong" in second
    assert not (tmp_path / "rows.jsonl").exists()


def test_options_survive_the_way_to_the_ranks():
    given = OperationOptions(("gemv_all_reduce",), "rows.jsonl", "proj", time_limit_s=3.0)
    assert OperationOptions.loads(given.dumps()) == given
