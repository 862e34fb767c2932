"""NCCL's all-reduce, predicted for sizes and ranks that were in no fit."""

from __future__ import annotations

import pytest

from flux_megatron.lab.perf import operator_cost
from flux_megatron.lab.perf.all_reduce import all_reduce_us
from flux_megatron.lab.perf.hardware import H200
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem


@pytest.mark.parametrize(("mebibytes", "measured"), [(8, 62), (64, 324), (192, 901)])
def test_four_ranks(mebibytes, measured):
    """Whose rows are in no fit: 4 x H200, as in `tests/test_perf.py`."""
    assert all_reduce_us(H200, mebibytes * 2**20, 4) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("M", "N", "K", "measured"),
    [(1, 8192, 8192, 27.6), (16, 8192, 8192, 29.5), (16, 12288, 49152, 162.8)],
)
def test_few_rows(M, N, K, measured):
    """mm and its all-reduce in decoding, of `gemv_ar.jsonl`."""
    problem = Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", 2)
    found = operator_cost.predict_us(problem, Plan("sequential"), H200)
    assert found == pytest.approx(measured, rel=0.15)
