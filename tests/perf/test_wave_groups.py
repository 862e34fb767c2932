"""The model of wave groups: what a band waits for, and for how long."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flux_megatron.lab.perf.band_plans import gather_model
from flux_megatron.lab.perf.hardware import H200
from flux_megatron.lab.perf.operator_cost import predict_us
from flux_megatron.lab.perf.wave_groups import Curve, WaveModel, model_of
from flux_megatron.problem import Pattern, Plan, Problem, Tile

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "h200x2" / "signalled.jsonl"
TILE = Tile(128, 256, 64, tma=True)
# y rows x N x local K, ranks: layers of GPT-3, Llama-2 and Llama-3, and others
SHAPES = [
    (pattern, M, N, K, ranks)
    for M, (N, K), (pattern, ranks) in itertools.product(
        (1024, 2048, 4096, 8192),
        ((12288, 3072), (12288, 12288), (8192, 7168), (4096, 1024), (16384, 2048)),
        ((Pattern.GEMM_RS, 2), (Pattern.GEMM_RS, 4), (Pattern.GEMM_AR, 4)),
    )
]


def problem(pattern, M, N, K, ranks, layout="nt") -> Problem:
    return Problem(pattern, M, N, ranks * K, "bfloat16", ranks, layout)


def test_a_band_waits_for_its_wave_and_for_the_band_before():
    model = WaveModel(
        rows=4, shards=1, tile_rows=1, tiles_n=2, sms=2, tile_us=10.0, start_us=1.0, row_bytes=1,
        curve=Curve((0.0, 4.0), (3.0, 3.0 + 4 * 8.0)),
    )  # fmt: skip
    assert model.gemm_us == 41.0
    assert model.finish_us(()) == 41.0 + 35.0
    assert model.finish_us((2,)) == 41.0 + 19.0  # the first two are away at 21 + 19 = 40
    assert model.finish_us((3,)) == 31.0 + 27.0 + 11.0  # the last row waits for the others
    assert replace(model, begin_us=30.0).finish_us((2,)) == 30.0 + 19.0 + 19.0
    assert replace(model, beside=False).finish_us((2,)) == 41.0 + 2 * 19.0


def test_a_curve_is_a_line_between_two_sizes_and_beyond_them():
    curve = Curve((1.0, 2.0, 4.0), (10.0, 12.0, 20.0))
    assert [curve.us(size) for size in (1.5, 2.0, 3.0, 5.0, 0.0)] == [11.0, 12.0, 16.0, 24.0, 8.0]


def test_predictions_are_between_the_gemm_and_one_after_the_other():
    for shape in SHAPES:
        for layout in ("nt", "nn"):
            asked = problem(*shape, layout=layout)
            plan = Plan("signalled", tile=TILE, comm_sms=8)
            model = model_of(asked, plan, H200)
            assert predict_us(asked, plan, H200) > model.gemm_us


def test_a_narrow_band_delays_those_after_it():
    """Its tile rows do not share what they read of w."""
    model = WaveModel(
        rows=8, shards=1, tile_rows=1, tiles_n=1, sms=1, tile_us=10.0, start_us=0.0, row_bytes=1,
        curve=Curve((0.0, 4.0), (1.0, 1.0)), group_m=4, narrow=0.4,
    )  # fmt: skip
    assert model.finish_us((4,)) == 80.0 + 1.0
    assert model.finish_us((2,)) == pytest.approx(20.0 * (1 + 0.4 / 4) + 60.0 + 1.0)
    assert model.finish_us((7,)) == pytest.approx(70.0 + 10.0 * (1 + 0.4 * 3 / 4) + 1.0)
    assert replace(model, group_us=5.0).finish_us((4,)) == 80.0 + 5.0 + 1.0


def test_a_cta_of_nccl_moves_what_was_measured():
    """The time of each further byte, where the latency is paid."""
    for row in map(json.loads, MEASURED.read_text().splitlines()):
        if row["table"] == "signalled curve" and row["comm_sms"] in (4, 8):
            asked = problem(Pattern(row["pattern"]), 8192, 12288, 6144, 2)
            plan = Plan("signalled", tile=TILE, comm_sms=row["comm_sms"])
            small, large = row["sizes"][-2:]
            curve = model_of(asked, plan, H200).curve
            more_us = row["us"][-1] - row["us"][-2]
            assert curve.us(large) - curve.us(small) == pytest.approx(more_us, rel=0.06)


def test_a_gather_has_bands_of_its_own():
    """The GEMM of the local shard hides the first band, that of each band the next one."""
    asked = problem(Pattern.AG_GEMM, 8192, 12288, 12288, 2)
    plan = Plan("signalled", tile=TILE, group_rows=(2048,))
    model = gather_model(asked, plan, H200)
    in_turn = predict_us(asked, Plan("sequential"), H200)
    assert model.finish_us(()) < in_turn, "the first band hides behind local rows"
    # collectives find no SM beside a library's GEMM: the model alone promises nothing
    assert predict_us(asked, plan, H200) == max(in_turn, model.finish_us(plan.group_rows))
