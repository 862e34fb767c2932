"""The race of `low_latency`'s tiles in small, and that it times no wrong GEMM."""

from __future__ import annotations

from unittest import mock

import few_rows as script
import pytest
import torch
from gemm_tiles import Shape
from ranks import DEVICE, on_device

from flux_megatron.overlap import low_latency_plans
from flux_megatron.problem import Pattern

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# On GPUs the weights of a shape are more than L2 holds: large ones are fewer.
SMALL = "3x2048x2048 nn" if DEVICE == "cuda" else "3x40x32 nn"
PATTERNS = (Pattern.GEMM_AR, Pattern.AG_GEMM)


def _rows(rank: int, pattern: Pattern) -> list[dict]:
    return list(script.measure(Shape.of(SMALL), torch.device(DEVICE), 2, DTYPE, pattern))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_row_for_each_tile_and_one_default(pattern):
    (rows,) = on_device(_rows, 1, pattern)
    assert rows[0]["tile"] == "library"
    assert {row["pattern"] for row in rows} == {pattern}
    assert [row["default"] for row in rows].count(True) == 1
    assert script.line(rows, "default").startswith(SMALL)
    assert script.line(rows, "default").count("*") == 1
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)


def test_former_defaults_take_part(monkeypatch):
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: True)
    shape = Shape.of("64x8192x4096 nt")
    plans = script.plans_of(script.problem_of(shape, torch.device("cuda", 0), torch.bfloat16))
    names = [script.name_of(plan) for plan in plans]
    assert {"64x64, 5 stages", "64x128, 5 stages", "64x128, 4 stages, TMA"} <= {*names}
    assert len(names) == len({*names})


def _refused(rank: int, pattern: Pattern) -> str:
    module, name = (
        (script.ag_gemv, "ag_gemv") if pattern is Pattern.AG_GEMM else (script.gemv_ar, "gemv_ar")
    )
    right = getattr(module, name)
    broken = mock.Mock(side_effect=lambda *args, **options: right(*args, **options) + 1)
    all_wrong = f"{6144 if DEVICE == 'cuda' else 120} numbers are wrong"
    with mock.patch.object(module, name, broken), pytest.raises(
        ArithmeticError, match=all_wrong
    ) as error:  # fmt: skip
        next(script.measure(Shape.of(SMALL), torch.device(DEVICE), 2, DTYPE, pattern))
    return str(error.value)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_wrong_tile_is_not_timed(pattern):
    (said,) = on_device(_refused, 1, pattern)
    assert said.startswith(f"{SMALL} with tiles of ")
