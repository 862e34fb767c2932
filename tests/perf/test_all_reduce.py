"""NCCL's all-reduce by the committed rows of 2 x H200, and what is chosen by it unmeasured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from flux_megatron.patterns import Pattern
from flux_megatron.perf import all_reduce, all_reduce_fits, operator_cost
from flux_megatron.perf.all_reduce import all_reduce_us
from flux_megatron.perf.hardware import H200
from flux_megatron.problem import Plan, Problem

DOCS = Path(__file__).parents[2] / "docs"
ROWS = DOCS / "results" / "h200x2"
STRATEGIES = ("sequential", "hopper", "fused", "pipelined")


@pytest.fixture(scope="module")
def cases():
    return all_reduce_fits.load(ROWS)


def test_the_numbers_are_those_of_the_committed_rows(cases):
    assert all_reduce_fits.protocols(cases) == all_reduce.PROTOCOLS
    assert all_reduce_fits.exposures(cases) == all_reduce.EXPOSED


def test_a_model_s_rows_are_predicted_without_them(cases):
    found = all_reduce_fits.errors(cases)
    assert {name: len(errors) for name, errors in found.items()} == {
        "alone, below 2 MiB": 17, "alone, from 4 MB": 40,
        "exposed beside wgrad, connections 1": 32, "exposed beside wgrad, connections unset": 48,
    }  # fmt: skip
    for name, errors in found.items():
        sizes = [abs(error) for error in errors]
        assert statistics.median(sizes) < 0.02, name
        assert max(sizes) < (0.35 if name == "alone, below 2 MiB" else 0.11), name


def test_the_page_has_the_table_of_the_command(cases):
    assert all_reduce_fits.table(cases) in (DOCS / "simulator.md").read_text()


@pytest.mark.parametrize(("mebibytes", "measured"), [(8, 62), (64, 324), (192, 901)])
def test_four_ranks(mebibytes, measured):
    """Whose rows are in no fit: 4 x H200, as in `tests/test_perf.py`."""
    assert all_reduce_us(H200, mebibytes * 2**20, 4) == pytest.approx(measured, rel=0.15)


def measured(file: str) -> dict[Problem, dict[str, float]]:
    """Operations of 2048 rows and more, as chosen without a rule for few rows; by strategy."""
    found: dict[Problem, dict[str, float]] = {}
    for line in (ROWS / file).read_text().splitlines():
        row = json.loads(line)
        if row["status"] != "ok" or row["M"] < 2048:
            continue
        backward = row["pattern"] == "backward_ar"
        N, K = row["N_local"], row["K_local"]
        N, K = (K, N) if backward else (N, K)
        layout = "nn" if backward else "nt"
        problem = Problem(Pattern.GEMM_AR, row["M"], N, 2 * K, "bfloat16", 2, layout)
        found.setdefault(problem, {})[row["candidate"]] = row["median_us"]
    return found


def regrets(connections: str) -> dict[Problem, float]:
    """Of the strategy with the least prediction, over the fastest."""
    file = {"unset": "all_reduced.jsonl", "1": "all_reduced_connections-1.jsonl"}[connections]
    found = {}
    for problem, times in measured(file).items():
        chosen = min(
            STRATEGIES,
            key=lambda name: operator_cost.predict_us(
                problem, Plan(name), H200, connections=connections
            ),
        )
        found[problem] = times[chosen] / min(times[name] for name in STRATEGIES) - 1
    return found


@pytest.mark.parametrize("connections", ["unset", "1"])
def test_what_is_chosen_unmeasured_is_nearly_the_fastest(connections):
    found = regrets(connections)
    assert len(found) == 16
    assert max(found.values()) < 0.01


def test_a_column_layer_s_share_is_seen_to_be_wrong(monkeypatch):
    """That of an all-gather and a reduce-scatter, at four ranks."""
    monkeypatch.setattr(all_reduce, "EXPOSED", {"unset": 0.866, "1": 0.325})
    assert max(regrets("1").values()) > 0.05


@pytest.mark.parametrize(
    ("M", "N", "K", "measured"),
    [(1, 8192, 8192, 27.6), (16, 8192, 8192, 29.5), (16, 12288, 49152, 162.8)],
)
def test_few_rows(M, N, K, measured):
    """mm and its all-reduce in decoding, of `gemv_ar.jsonl`."""
    problem = Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", 2)
    found = operator_cost.predict_us(problem, Plan("sequential"), H200)
    assert found == pytest.approx(measured, rel=0.15)
