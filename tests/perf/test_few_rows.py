"""Few rows that are divided over two ranks: the model and the choice beside their measured rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flux_megatron.perf import operator_cost
from flux_megatron.perf.hardware import H200
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import estimate

ROWS = Path(__file__).parents[2] / "docs/results/h200x2/few_rows_bench.jsonl"
PLAIN, WORDS = Plan("sequential"), Plan("low_latency")
WIDE = 28672  # columns, of which our GEMM is slower than the library's
Times = dict[str, float]


@cache
def measured() -> dict[tuple[Problem, str], Times]:
    """Microseconds by candidate, of each problem and layer."""
    found: dict[tuple[Problem, str], Times] = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        pattern, M = Pattern(row["pattern"]), row["M"]
        rows = M // 2 if pattern.spec.gathers else M
        problem = Problem.of_operands(
            pattern, rows, row["N_local"], row["K_local"], "bfloat16", 2, "nt", "cuda"
        )  # a GEMM with a collective: the layer's layout "nn" would stand for its whole backward
        if row["median_us"]:
            found.setdefault((problem, row["op"]), {})[row["candidate"]] = row["median_us"]
    return found


def few() -> Iterator[tuple[Problem, Times]]:
    """Of at most 64 rows: those that an estimate may give to `low_latency`."""
    for (problem, _), us in measured().items():
        if problem.M <= 64:
            yield problem, us


def test_nccl_takes_few_bytes_as_fast_as_it_says():
    errors = []
    for (problem, _), us in measured().items():
        predicted = operator_cost.collective_us(H200, operator_cost.moved_bytes(problem), 2)
        errors.append(abs(predicted / (us["serial"] - us["gemm"]) - 1))
    assert len(errors) == 36
    assert statistics.median(errors) < 0.1


def behind(problem: Problem, us: Times) -> float:
    """What the words take beyond the library's GEMM, less what they are predicted to."""
    predicted = operator_cost.predict_us(problem, WORDS, H200)
    gemm, _ = operator_cost.gemms_us(problem, H200)
    return us["low_latency"] - us["gemm"] - (predicted - gemm)


def test_words_take_as_long_as_it_says():
    errors = {problem: behind(problem, us) for problem, us in few()}
    gathered = {p: error for p, error in errors.items() if p.spec.gathers}
    wide = [error for p, error in gathered.items() if p.N_local == WIDE]
    others = [error for p, error in gathered.items() if p.N_local != WIDE]
    scattered = [error for p, error in errors.items() if p.spec.scatters]
    assert min(others) > -3.3
    assert max(others) < 4
    assert min(wide) > -2
    assert max(wide) < 10
    assert min(scattered) > -2.1
    assert max(scattered) < 3.6


def chosen() -> list[tuple[Problem, bool, float]]:
    """Each problem, whether it gets `low_latency`, and the time of that over NCCL's."""
    return [
        (
            problem,
            estimate.best(problem, [PLAIN, WORDS], [], "unset", H200) == WORDS,
            us["low_latency"] / us["serial"],
        )
        for problem, us in few()
    ]


def test_who_gets_words_is_faster_by_them():
    taken = [ratio for _, words, ratio in chosen() if words]
    assert len(taken) == 13
    assert max(taken) < 1
    assert statistics.mean(taken) < 0.93
    assert all(words for problem, words, _ in chosen() if problem.spec.scatters)


@pytest.mark.parametrize("name", ["FEW_MARGIN", "STAGED"])
def test_a_choice_without_what_was_measured_is_seen(monkeypatch, name):
    if name == "FEW_MARGIN":
        monkeypatch.setattr(estimate, name, 0.0)
    else:
        monkeypatch.setattr(operator_cost, name, 1.0)
    assert max(ratio for _, words, ratio in chosen() if words) > 1
