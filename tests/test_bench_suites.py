"""What is measured: the shapes against numbers worked out by hand, and the arithmetic of E."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flux_megatron.lab.bench import suites
from flux_megatron.lab.bench.competitors import all_competitors
from flux_megatron.lab.bench.options import Options
from flux_megatron.lab.bench.records import Baselines, baselines

# N and K of one rank's GEMM at TP 4
SIZES = {
    "gpt3-175b": {
        "qkv": (9216, 12288), "fc1": (12288, 12288), "proj": (12288, 3072), "fc2": (12288, 12288),
        "qkv dgrad": (12288, 9216), "fc1 dgrad": (12288, 12288),
        "proj dgrad": (3072, 12288), "fc2 dgrad": (12288, 12288),
    },
    "llama2-70b": {
        "qkv": (2560, 8192), "fc1": (14336, 8192), "proj": (8192, 2048), "fc2": (8192, 7168),
        "qkv dgrad": (8192, 2560), "fc1 dgrad": (8192, 14336),
        "proj dgrad": (2048, 8192), "fc2 dgrad": (7168, 8192),
    },
}  # fmt: skip
OPS = {
    "ag_gemm": ("qkv", "fc1", "proj dgrad", "fc2 dgrad"),
    "gemm_rs": ("proj", "fc2", "qkv dgrad", "fc1 dgrad"),
    "backward": ("qkv", "fc1", "proj", "fc2"),
    "gemm_ar": ("proj", "fc2"),
    "backward_ar": ("qkv", "fc1"),
}
ALL = {(suite, pattern): ops for suite in SIZES for pattern, ops in OPS.items()}


@pytest.mark.parametrize(("suite", "pattern"), ALL)
def test_shapes(suite, pattern):
    M = 1 if pattern.endswith("_ar") else 1024  # whole tokens are not divided
    found = suites.cases(suite, pattern, (M,), 4)
    nn = [op for op in ALL[suite, pattern] if "dgrad" in op or "backward" in pattern]
    assert [(case.op, (case.N_local, case.K_local), case.layout, case.M) for case in found] == [
        (op, SIZES[suite][op], "nn" if op in nn else "nt", M) for op in ALL[suite, pattern]
    ]


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
