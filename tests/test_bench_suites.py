"""What is measured: the shapes against numbers worked out by hand, and the arithmetic of E."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flux_megatron.lab.bench import suites
from flux_megatron.lab.bench.competitors import all_competitors
from flux_megatron.lab.bench.options import Options
from flux_megatron.lab.bench.records import Baselines, baselines

# layer: N and K of one rank's GEMM at TP 4, and how the weight lies
LOCAL = {
    ("gpt3-175b", "ag_gemm"): {
        "qkv": (9216, 12288, "nt"), "fc1": (12288, 12288, "nt"),
        "proj dgrad": (3072, 12288, "nn"), "fc2 dgrad": (12288, 12288, "nn"),
    },
    ("gpt3-175b", "gemm_rs"): {
        "proj": (12288, 3072, "nt"), "fc2": (12288, 12288, "nt"),
        "qkv dgrad": (12288, 9216, "nn"), "fc1 dgrad": (12288, 12288, "nn"),
    },
    ("gpt3-175b", "backward"): {
        "qkv": (9216, 12288, "nn"), "fc1": (12288, 12288, "nn"),
        "proj": (12288, 3072, "nn"), "fc2": (12288, 12288, "nn"),
    },
    ("gpt3-175b", "gemm_ar"): {"proj": (12288, 3072, "nt"), "fc2": (12288, 12288, "nt")},
    ("gpt3-175b", "backward_ar"): {"qkv": (9216, 12288, "nn"), "fc1": (12288, 12288, "nn")},
    ("llama2-70b", "ag_gemm"): {
        "qkv": (2560, 8192, "nt"), "fc1": (14336, 8192, "nt"),
        "proj dgrad": (2048, 8192, "nn"), "fc2 dgrad": (7168, 8192, "nn"),
    },
    ("llama2-70b", "gemm_rs"): {
        "proj": (8192, 2048, "nt"), "fc2": (8192, 7168, "nt"),
        "qkv dgrad": (8192, 2560, "nn"), "fc1 dgrad": (8192, 14336, "nn"),
    },
    ("llama2-70b", "backward"): {
        "qkv": (2560, 8192, "nn"), "fc1": (14336, 8192, "nn"),
        "proj": (8192, 2048, "nn"), "fc2": (8192, 7168, "nn"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("suite", "pattern"), LOCAL)
def test_shapes(suite, pattern):
    found = suites.cases(suite, pattern, (1024,), 4)
    local = {case.op: (case.N_local, case.K_local, case.layout) for case in found}
    assert local == LOCAL[suite, pattern]
    assert len(found) == len(local)
    assert {case.M for case in found} == {1024}


def test_what_travels_has_the_hidden_size():
    for case in suites.cases("llama2-70b", "ag_gemm", (64,), 4):
        assert case.K == 8192
    for case in suites.cases("llama2-70b", "gemm_rs", (64,), 4):
        assert case.N == 8192


def test_the_papers_operators_have_its_global_sizes():
    """(N, K) = (49152, 12288) and (12288, 49152)."""
    for pattern, op, N, K in (("ag_gemm", "fc1", 49152, 12288), ("gemm_rs", "fc2", 12288, 49152)):
        (case,) = (c for c in suites.cases("gpt3-175b", pattern, (64,), 8) if c.op == op)
        assert (case.N, case.K) == (N, K)


def test_whole_tokens_are_not_divided():
    for pattern in ("gemm_ar", "backward_ar"):
        assert {case.M for case in suites.cases("gpt3-175b", pattern, (1,), 4)} == {1}


def test_cases_of_one_suite_and_M_come_together():
    options = Options(tuple(suites.MODELS), suites.PATTERNS, (64, 128), out="rows.jsonl")
    order = [(case.suite, case.M) for case in options.cases()]
    assert [*dict.fromkeys(order)] == [(s, M) for s in suites.MODELS for M in (128, 64)]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == 3


def test_efficiency():
    against = baselines({"gemm": 3024.0, "serial": 3526.0})
    assert against == Baselines(3024.0, 3526.0)
    assert against.efficiency(3024.0) == 1
    assert against.efficiency(3526.0) == 0
    assert against.efficiency(3080.0) == pytest.approx(0.888, abs=1e-3)
    assert against.efficiency(4028.0) == -1


def test_our_faster_gemm_moves_both_baselines():
    against = baselines({"gemm": 100.0, "serial": 150.0, "ours_gemm": 90.0})
    assert against == Baselines(90.0, 140.0)
    assert against.efficiency(100.0) == pytest.approx(0.8)
    assert baselines({"gemm": 100.0, "serial": 150.0, "ours_gemm": 110.0}).gemm == 100.0


def test_the_faster_of_serial_and_its_graph_counts():
    times = {"gemm": 100.0, "serial": 150.0, "ours_gemm": 90.0}
    assert baselines(times | {"serial_graph": 145.0}) == Baselines(90.0, 135.0)
    assert baselines(times | {"serial_graph": 155.0}) == Baselines(90.0, 140.0)


def test_no_efficiency_where_there_is_nothing_to_hide():
    assert baselines({"gemm": 100.0, "serial": 100.0}).efficiency(90.0) is None
    assert baselines({"gemm": 100.0}) is None


def test_every_competitor_has_candidates():
    assert [one.name for one in all_competitors()] == [*suites.PEERS]
