"""`low_latency` in the cost model beside its measured rows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from flux_megatron.lab.perf import operator_cost
from flux_megatron.lab.perf.hardware import H200
from flux_megatron.lab.perf.operator_cost import predict_us
from flux_megatron.problem import Pattern, Plan, Problem

ROWS = Path(__file__).parents[2] / "docs/results/h200x2/gemv_ar.jsonl"
FEW = 16
PLAN = Plan("low_latency")


def measured() -> dict[Problem, dict[str, float]]:
    """Microseconds by the first word of the candidate, of each problem."""
    found: dict[Problem, dict[str, float]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        if row["table"] == "gemv_ar" and row["captured"]:
            sizes = (row["M"], row["N"], row["K"])
            problem = Problem(Pattern.GEMM_AR, *sizes, "bfloat16", row["tp"])
            name = row["candidate"].removeprefix("mm ").split()[0]
            found.setdefault(problem, {})[name] = row["us"]
    return found


def test_the_trip_is_what_rows_of_few_rows_show():
    trips = []
    for problem, us in measured().items():
        if problem.M <= FEW:
            words = 2 * operator_cost.moved_bytes(problem) / H200.copy_gbps * 1e-3
            trips.append(us["low_latency"] - us["alone"] - words)
    assert len(trips) == 13
    assert round(statistics.median(trips), 1) == operator_cost.WORDS_TRIP_US


@pytest.mark.parametrize(("M", "lowest", "highest"), [(FEW, 0.0, 0.1), (64, -0.23, 0.0)])
def test_predictions_are_as_wrong_as_it_says(M, lowest, highest):
    errors = [
        predict_us(problem, PLAN, H200) / us["low_latency"] - 1
        for problem, us in measured().items()
        if problem.K > 1000 and (problem.M <= FEW if M == FEW else problem.M == M)
    ]
    assert len(errors) == (12 if M == FEW else 4)
    assert lowest < min(errors)
    assert max(errors) < highest


def test_two_phases_take_two_trips():
    problem = Problem(Pattern.GEMM_AR, 1, 8192, 8192, "bfloat16", 8)
    once, twice = (
        predict_us(problem, Plan("low_latency", two_phase=two), H200) for two in (False, True)
    )
    assert twice - once == pytest.approx(operator_cost.WORDS_TRIP_US, abs=0.5)
