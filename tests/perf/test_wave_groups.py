"""The choice of wave groups, beside an exhaustive search by the same model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flux_megatron.perf import wave_groups
from flux_megatron.perf.band_plans import best_plans, gather_model
from flux_megatron.perf.hardware import H200, find_or_assume
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.perf.wave_groups import (
    Curve,
    WaveModel,
    best,
    ends_of,
    exhaustive,
    model_of,
)
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import tuner

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


def uneven(scale: float) -> Curve:
    """A curve with a knee, as protocols of NCCL make it."""
    return Curve((0.0, 2e6, 2e7, 1e9), (20.0, 28.0, 90.0 * scale, 4200.0 * scale))


@pytest.mark.parametrize("curve", [None, uneven(1.0), uneven(3.0)], ids=["line", "knee", "slow"])
def test_the_choice_is_within_1_percent_of_exhaustive_search(curve):
    assert len(SHAPES) >= 40
    several = 0
    for shape in SHAPES:
        model = model_of(problem(*shape), Plan("signalled", tile=TILE, comm_sms=16), H200)
        model = replace(model, curve=curve or model.curve)
        ends = model.ends(units=9)
        times = [model.finish_us(choose(model, ends)) for choose in (best, exhaustive)]
        assert times[0] <= 1.01 * times[1], shape
        # finer ends, which no exhaustive search could try, are at least as good
        assert model.finish_us(best(model, model.ends())) <= 1.01 * times[1], shape
        several += len(best(model, ends)) > 1
    assert several > len(SHAPES) // 4  # the search is not trivial


def test_one_group_or_one_a_tile_are_far_from_it():
    """What the test above would say of a search that chooses badly."""
    worse = {"one": 0, "all": 0}
    for shape in SHAPES:
        model = model_of(problem(*shape), Plan("signalled", tile=TILE, comm_sms=16), H200)
        ends = model.ends(units=9)
        least = model.finish_us(exhaustive(model, ends))
        all_ends = tuple(b - a for a, b in itertools.pairwise((0, *ends[:-1])))
        worse["one"] += model.finish_us(()) > 1.01 * least
        worse["all"] += model.finish_us(all_ends) > 1.01 * least
    assert min(worse.values()) > len(SHAPES) // 4, worse


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
    assert best(model, model.ends()) == exhaustive(model, model.ends()) != ()


def test_a_curve_is_a_line_between_two_sizes_and_beyond_them():
    curve = Curve((1.0, 2.0, 4.0), (10.0, 12.0, 20.0))
    assert [curve.us(size) for size in (1.5, 2.0, 3.0, 5.0, 0.0)] == [11.0, 12.0, 16.0, 24.0, 8.0]


def test_the_tuner_measures_the_predicted_groups_first():
    asked = problem(Pattern.GEMM_RS, 8192, 12288, 12288, 2)
    plans = tuner.variants(replace(asked, device="cpu"), "signalled", H200)
    predicted = [predict_us(asked, plan, H200) for plan in plans]
    assert predicted[0] == min(predicted)
    assert {plan.comm_sms for plan in plans} <= {*wave_groups.COMM_SMS}
    assert plans[0] == best_plans(asked, plans[0], H200)[0]


def test_predictions_are_between_the_gemm_and_one_after_the_other():
    for shape in SHAPES:
        for layout in ("nt", "nn"):
            asked = problem(*shape, layout=layout)
            for plan in best_plans(asked, Plan("signalled", tile=TILE), H200):
                model = model_of(asked, plan, H200)
                us = predict_us(asked, plan, H200)
                assert us > model.gemm_us
                assert us <= predict_us(asked, replace(plan, group_rows=()), H200)


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


def test_a_link_without_a_model_is_assumed_and_said():
    """The slower the link, the fewer CTAs it needs, and the earlier the first band must begin."""
    asked = problem(Pattern.GEMM_RS, 8192, 12288, 6144, 2)
    links = {"nvlink": ("nvlink", True), "pcie": ("pcie", True), "nodes": ("nvlink", False)}
    facts = {name: find_or_assume("NVIDIA H200", *given) for name, given in links.items()}
    assert facts["nvlink"] == H200
    assert "assumed: PCIe of 32 GB/s" in facts["pcie"].source
    assert "assumed: 45 GB/s a GPU between nodes" in facts["nodes"].source
    assert H200.nccl_gbps > facts["nodes"].nccl_gbps > facts["pcie"].nccl_gbps
    assert find_or_assume("unknown", "pcie") is None
    like = Plan("signalled", tile=TILE)
    best = {name: best_plans(asked, like, known)[0] for name, known in facts.items()}
    assert best["pcie"].group_rows[0] < best["nvlink"].group_rows[0]
    assert best["pcie"].comm_sms <= best["nvlink"].comm_sms


def test_a_gather_has_bands_of_its_own():
    """The GEMM of the local shard hides the first band, that of each band the next one."""
    asked = problem(Pattern.AG_GEMM, 8192, 12288, 12288, 2)
    for facts in (H200, find_or_assume("H200", "pcie"), find_or_assume("H200", "nvlink", False)):
        plans = best_plans(asked, Plan("signalled", tile=TILE), facts)
        for plan in plans:
            model = gather_model(asked, plan, facts)
            ends = ends_of(model.rows, 128, units=9)
            times = [model.finish_us(choose(model, ends)) for choose in (best, exhaustive)]
            assert times[0] == pytest.approx(times[1])
            assert model.finish_us(plan.group_rows) <= times[1]
            in_turn = predict_us(asked, Plan("sequential"), facts)
            # collectives find no SM beside a library's GEMM: the model alone promises nothing
            assert predict_us(asked, plan, facts) == max(in_turn, times[1])
    model = gather_model(asked, plans[0], facts)
    assert model.finish_us(plans[0].group_rows) < min(model.finish_us(()), in_turn)
