"""`flux-megatron bench check` of rows of tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flux_megatron.bench import records
from flux_megatron.bench.check import MET, MISSED, MISSING
from flux_megatron.bench.operations.check import TABLES, check
from flux_megatron.cli import app

RESULTS = Path(__file__).parents[1] / "docs/results/h200x2"
WHERE = {
    "run": "first", "gpu": "NVIDIA H200", "nvls": "off", "scale": 1, "world_size": 2,
    "max_connections": "unset",
}  # fmt: skip


def gemv(candidate: str, us: float, case: str = "gpt3-175b proj", M: int = 4, **where) -> dict:
    sizes = {"table": "gemv_ar", "case": case, "M": M, "candidate": candidate, "us": us}
    return sizes | WHERE | where


def rows_of_gemv(ours: float, **where) -> list[dict]:
    return [
        gemv("mm alone", 1.0, **where),
        gemv("mm + all-reduce", 12.2, **where),
        gemv("mm + one_shot_all_reduce, eager", 2.0, **where),
        gemv("low_latency 32x128x5", ours, **where),
    ]


def verdicts(rows: list[dict], tp: int = 2) -> dict[str, str]:
    return {one.target.partition(": ")[2]: one.outcome.verdict for one in check(rows, tp)}


@pytest.mark.parametrize(
    ("ours", "slower", "faster"), [(9.9, MET, MET), (10.1, MET, MISSED), (12.3, MISSED, MISSED)]
)
def test_times_as_fast(ours, slower, faster):
    found = verdicts(rows_of_gemv(ours))
    assert found == {"never slower": slower, "1.22 times as fast": faster}


def test_many_rows_are_only_not_to_be_slower():
    assert verdicts(rows_of_gemv(12.0, M=64)) == {"never slower": MET}


@pytest.mark.parametrize(("ours", "expected"), [(8.0, MET), (8.1, MISSED)])
def test_the_all_reduce_alone_has_a_bound_in_us(ours, expected):
    found = verdicts(rows_of_gemv(ours, case="all-reduce alone", M=6))
    assert found == {"never slower": MET, "at most 8.0 us": expected}


def test_the_faster_form_of_both_counts():
    sizes = dict(zip(TABLES["embedding_a2a"].case, ("forward", 8, 4, 3, "float32", 0.0)))  # noqa: B905
    us = {"lookup": 1.0, "library": 130.0, "library in a graph": 118.0, "fused": 99.0,
          "fused in a graph": 105.0}  # fmt: skip
    rows = [
        WHERE | sizes | {"table": "embedding_a2a", "candidate": name, "median_us": time}
        for name, time in us.items()
    ]
    assert verdicts(rows) == {"never slower": MET, "1.20 times as fast": MISSED}  # 1.19


@pytest.mark.parametrize(
    ("pattern", "M", "ours", "expected"),
    [
        ("gemm_ar", 4096, 110.0, MET),
        ("gemm_ar", 4096, 110.1, MISSED),
        ("gemm_ar", 2048, 150.0, None),
        ("gemm_rs", 8192, 150.0, None),
    ],
)
def test_efficiency_of_gemm_ar(pattern, M, ours, expected):
    us = {"gemm": 100.0, "serial": 205.0, "serial, graph": 200.0, "kernel alone, 0 SMs": 1.0,
          "sequential": 1.0, "pipelined": ours}  # fmt: skip
    sizes = {"table": "signalled", "pattern": pattern, "M": M, "N": 8, "K": 8}
    rows = [WHERE | sizes | {"candidate": name, "median_us": time} for name, time in us.items()]
    assert {row["candidate"] for row in rows} > {"pipelined"}
    assert verdicts(rows).get("E >= 0.90") == expected


def test_the_last_run_counts_and_is_not_mixed_with_others():
    later = rows_of_gemv(12.3, run="second")
    assert verdicts(rows_of_gemv(9.0) + later)["never slower"] == MISSED
    assert verdicts(later + rows_of_gemv(9.0))["never slower"] == MET
    assert verdicts(rows_of_gemv(9.0) + later[-1:]) == {"never slower": MISSING}


@pytest.mark.parametrize(
    "where", [{"gpu": "NVIDIA A100"}, {"nvls": "on"}, {"scale": 64}, {"world_size": 4}]
)
def test_rows_of_another_machine_do_not_count(where):
    assert not check(rows_of_gemv(9.0, **where), 2)


def test_a_candidate_that_failed_has_no_time():
    rows = rows_of_gemv(9.0)
    del rows[-1]["us"]
    assert verdicts(rows) == {"never slower": MISSING}


@pytest.mark.parametrize(
    "file", ["gemv_ar", "embedding_a2a", "expert_parallel", "signalled", "signalled_hopper"]
)
def test_committed_rows_are_judged(file):
    rows = records.load_tables(RESULTS / f"{file}.jsonl")
    found = check(rows, 2)
    assert {one.case.split()[0] for one in found} == {file.removesuffix("_hopper")}
    assert {one.outcome.verdict for one in found} <= {MET, MISSED}


def test_the_command(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of_gemv(9.0)))
    done = CliRunner().invoke(app, ["bench", "check", "--tp", "2", str(file)])
    assert done.exit_code == 0, done.output
    assert "low_latency 32x128x5 9.0 us against mm + all-reduce 12.2: 1.356" in done.output
    done = CliRunner().invoke(app, ["bench", "check", "--tp", "8", str(file)])
    assert done.exit_code == 1
    assert "no row of 8 ranks" in done.output
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of_gemv(13.0)))
    done = CliRunner().invoke(app, ["bench", "check", "--tp", "2", "--quiet", str(file)])
    assert done.exit_code == 1
    assert "missed  connections unset, gemv_ar case=gpt3-175b proj M=4" in done.output
