"""The cost model: close to what was measured on 4 x H200, and never absurd elsewhere."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_megatron.lab.perf import operator_cost
from flux_megatron.lab.perf.all_reduce import all_reduce_us
from flux_megatron.lab.perf.hardware import A100, GPUS, H100, H200, find
from flux_megatron.lab.perf.operator_cost import (
    collective_us,
    gemm_us,
    gemms_us,
    moved_bytes,
    predict_us,
)
from flux_megatron.problem import Pattern, Plan, Problem

# Microseconds on 4 x H200, bf16, the GEMM's local M x N x K: the GEMM alone, then NCCL and GEMM,
# chunks of library GEMMs, one fused kernel.
MEASURED = {
    ("ag_gemm", 8192, 12288, 12288): (3024, 3526, 3080, 3104),
    ("ag_gemm", 8192, 9216, 12288): (2294, 2796, 2327, 2334),
    ("ag_gemm", 8192, 14336, 8192): (2394, 2740, 2421, 2444),
    ("ag_gemm", 4096, 12288, 12288): (1531, 1798, 1559, 1553),
    ("ag_gemm", 2048, 12288, 12288): (766, 911, 828, 784),
    ("ag_gemm", 1024, 12288, 12288): (387, 473, 440, None),
    ("gemm_rs", 8192, 12288, 12288): (3024, 3538, 3145, 3341),
    ("gemm_rs", 8192, 12288, 3072): (779, 1290, 889, 982),
    ("gemm_rs", 8192, 8192, 7168): (1227, 1578, 1270, 1367),
    ("gemm_rs", 4096, 12288, 12288): (1527, 1798, 1581, 1694),
    ("gemm_rs", 2048, 12288, 12288): (766, 911, 846, 869),
    ("gemm_rs", 1024, 12288, 12288): (386, 468, 450, 437),
}
SEQUENTIAL, PIPELINED, FUSED = (Plan(name) for name in ("sequential", "pipelined", "fused"))
PLANS = [
    SEQUENTIAL, PIPELINED, FUSED, Plan("pipelined", splits=2),
    Plan("hopper"), Plan("hopper", transport="sm"),
]  # fmt: skip
SIZES = st.sampled_from([64, 192, 512, 1024, 3072, 8192, 12288])


def problem(pattern: str, M: int, N: int, K: int, layout: str = "nt") -> Problem:
    """Of four ranks, by the local sizes."""
    gathers = pattern == "ag_gemm"
    N, K = N * (4 if gathers else 1), K * (1 if gathers else 4)
    return Problem(Pattern(pattern), M, N, K, "bfloat16", 4, layout)


@pytest.mark.parametrize("shape", MEASURED, ids=lambda shape: "x".join(map(str, shape)))
def test_within_15_percent_of_what_was_measured(shape):
    gemm, *times = MEASURED[shape]
    assert gemm_us(H200, *shape[1:], "bfloat16") == pytest.approx(gemm, rel=0.15)
    for plan, measured in zip((SEQUENTIAL, PIPELINED, FUSED), times, strict=True):
        if measured is not None:
            predicted = predict_us(problem(*shape), plan, H200)
            assert predicted == pytest.approx(measured, rel=0.15), plan.strategy


def test_the_backward_of_stock_layers():
    """Forward and backward of one layer as Megatron-core runs it, by its own measurement."""
    for M, N, K, measured in [(8192, 12288, 12288, 10093), (8192, 9216, 12288, 7759)]:
        forward = problem("ag_gemm", M, N, K)
        backward = problem("gemm_rs", M, K, N, "nn")
        both = sum(predict_us(half, SEQUENTIAL, H200) for half in (forward, backward))
        assert both == pytest.approx(measured, rel=0.05)
    forward = problem("gemm_rs", 8192, 12288, 3072)
    backward = problem("ag_gemm", 8192, 3072, 12288, "nn")
    both = sum(predict_us(half, SEQUENTIAL, H200) for half in (forward, backward))
    assert both == pytest.approx(3345, rel=0.05)


@pytest.mark.parametrize(("mebibytes", "measured"), [(8, 48), (64, 189), (192, 501)])
def test_collectives(mebibytes, measured):
    assert collective_us(H200, mebibytes * 2**20, 4) == pytest.approx(measured, rel=0.15)


@given(SIZES, SIZES, SIZES, st.sampled_from(GPUS))
def test_a_larger_gemm_never_takes_less(M, N, K, gpu):
    one = gemm_us(gpu, M, N, K, "bfloat16")
    assert one > 2e-6 * M * N * K / gpu.tflops["bfloat16"]
    for larger in [(2 * M, N, K), (M, 2 * N, K), (M, N, 2 * K)]:
        assert gemm_us(gpu, *larger, "bfloat16") >= one


@given(
    st.sampled_from(["ag_gemm", "gemm_rs"]), SIZES, SIZES, SIZES,
    st.sampled_from(["nt", "nn"]), st.sampled_from(PLANS),
)  # fmt: skip
def test_a_larger_problem_never_takes_less_and_hiding_gains_no_more_than_there_is(
    pattern, M, N, K, layout, plan
):
    now, twice = (problem(pattern, rows, N, K, layout) for rows in (M, 2 * M))
    assert predict_us(twice, plan, H200) >= predict_us(now, plan, H200)
    assert predict_us(now, plan, H200) >= gemm_us(H200, M, N, K, "bfloat16") - H200.launch_us
    assert predict_us(now, plan, A100) > predict_us(now, plan, H100) * 0.99


def test_beside_others_every_strategy_has_fewer_sms():
    """What travels takes as long; the GEMM's waves are shared by 116 of 132 SMs."""
    for pattern in ("ag_gemm", "gemm_rs"):
        alone = problem(pattern, 8192, 12288, 12288)
        beside = replace(alone, beside=True)
        (one, _), (other, _) = gemms_us(alone, H200), gemms_us(beside, H200)
        assert other / one == pytest.approx(132 / 116, rel=0.02)
        for plan in PLANS:
            assert predict_us(beside, plan, H200) > predict_us(alone, plan, H200)
        more = predict_us(beside, SEQUENTIAL, H200) - predict_us(alone, SEQUENTIAL, H200)
        assert more == pytest.approx(other - one)


def test_small_problems_are_not_cut_into_library_gemms():
    """Each of four GEMMs would read the whole weight."""
    small = problem("ag_gemm", 64, 12288, 12288)
    assert predict_us(small, SEQUENTIAL, H200) < predict_us(small, PIPELINED, H200)
    large = problem("ag_gemm", 8192, 12288, 12288)
    assert predict_us(large, SEQUENTIAL, H200) > predict_us(large, PIPELINED, H200)


def test_what_a_plan_may_differ_in():
    """Fewer GEMMs are shorter and wait longer; stores cost bandwidth and save the first 10 us."""
    large, small = problem("gemm_rs", 8192, 12288, 3072), problem("gemm_rs", 64, 12288, 12288)
    whole, by_sm = Plan("pipelined", splits=1), Plan("hopper", transport="sm")
    assert predict_us(small, whole, H200) < predict_us(small, PIPELINED, H200)
    assert predict_us(large, whole, H200) > predict_us(large, PIPELINED, H200)
    assert predict_us(large, by_sm, H200) > predict_us(large, Plan("hopper"), H200)
    gather = problem("ag_gemm", 64, 128, 4096)  # a GEMM of microseconds
    assert predict_us(gather, by_sm, H200) < predict_us(gather, Plan("hopper"), H200)


@pytest.mark.parametrize(
    ("gpu", "link", "expected"),
    [
        ("NVIDIA H200", "nvlink", H200),
        ("NVIDIA H100 80GB HBM3", "nvlink", H100),
        ("NVIDIA A100-SXM4-80GB", "nvlink", A100),
        ("NVIDIA H100 PCIe", "pcie", None),
        ("NVIDIA L40S", "pcie", None),
        ("NVIDIA GH2000", "nvlink", None),
        ("cpu", "host memory", None),
    ],
)
def test_facts_are_found_by_the_name_of_the_gpu(gpu, link, expected):
    assert find(gpu, link) is expected


def test_what_is_exposed_is_the_collective_where_nothing_overlaps():
    large = problem("ag_gemm", 8192, 12288, 12288)
    collective = collective_us(H200, moved_bytes(large), 4)
    gemms = sum(gemms_us(large, H200))
    assert predict_us(large, SEQUENTIAL, H200) - gemms == pytest.approx(collective)
    assert 0.0 <= predict_us(large, Plan("hopper"), H200) - gemms < 0.2 * collective


@pytest.mark.parametrize(("mebibytes", "measured"), [(8, 62), (64, 324), (192, 901)])
def test_all_reduces_of_four_ranks(mebibytes, measured):
    assert all_reduce_us(H200, mebibytes * 2**20, 4) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("M", "N", "K", "measured"),
    [(1, 8192, 8192, 27.6), (16, 8192, 8192, 29.5), (16, 12288, 49152, 162.8)],
)
def test_all_reduces_of_few_rows(M, N, K, measured):
    """mm and its all-reduce in decoding, of `gemv_ar.jsonl`."""
    problem = Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", 2)
    found = predict_us(problem, Plan("sequential"), H200)
    assert found == pytest.approx(measured, rel=0.15)


ROWS = Path(__file__).parents[1] / "docs/results/h200x2/gemv_ar.jsonl"
FEW = 16
WORDS = Plan("low_latency")


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
        predict_us(problem, WORDS, H200) / us["low_latency"] - 1
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


RACED = Path(__file__).parents[1] / "docs/results/h100x2"
ONE_GEMM = Plan("pipelined", splits=1)


def test_it_takes_as_long_beyond_the_gemm_as_predicted():
    raced: dict[tuple[str, str], dict[str, float]] = {}
    for file in ("held_out.jsonl", "k_parts.jsonl"):
        for row in map(json.loads, (RACED / file).read_text().splitlines()):
            if row["case"].startswith("ag_gemm") and not row["beside"]:
                plan = row["plan"].replace('"split_k_shards": 0, ', "")  # which plans had
                raced.setdefault((row["case"], row["run"]), {})[plan] = row["median_us"]
    shapes = set()
    for (case, _), us in raced.items():
        M, N, K = map(int, case.split()[1].split("x"))
        problem = Problem.of_operands(Pattern.AG_GEMM, M // 2, N, K, "bfloat16", 2, "nt", "cuda")
        if ONE_GEMM.dumps() not in us:
            continue
        predicted = predict_us(problem, ONE_GEMM, H100) - gemms_us(problem, H100)[0]
        assert abs(us[ONE_GEMM.dumps()] - us["gemm"] - predicted) < 4, case
        shapes.add(case)
    assert len(shapes) == 12
