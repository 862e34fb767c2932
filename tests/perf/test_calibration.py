"""The constants come from the committed rows, and predict layers that they were not fitted to."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flux_megatron.perf import calibration, gemm, operator_cost, published
from flux_megatron.perf.calibration import Prediction, fit, holdout, predictions, renew, table
from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.rows import CANDIDATES, cell, load, of_layer
from flux_megatron.problem import Plan
from flux_megatron.tuning import choice, estimate, plan_cache, plan_cost, tuner

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
MEASURED = DOCS / "results" / "h200x4"
BOUND = 0.05


@pytest.fixture(scope="module")
def rows():
    return load(sorted(MEASURED.glob("operators_*.jsonl")))


@pytest.fixture(scope="module")
def held_out(rows):
    return holdout(rows)


def misses(found: list[Prediction]) -> list[Prediction]:
    return [one for one in found if abs(one.error) > BOUND]


def test_the_constants_are_those_of_the_committed_rows(rows):
    found = fit(rows)
    for name in ("gemm_rate", "tile_us", "accumulate", "hidden"):
        assert getattr(found, name) == pytest.approx(getattr(FITTED, name)), name
    assert found.call_overhead_us == pytest.approx(FITTED.call_overhead_us)
    assert found.megatron_backward == pytest.approx(FITTED.megatron_backward)
    assert found.exposures.keys() == FITTED.exposures.keys()
    for key, exposure in found.exposures.items():
        assert asdict(exposure) == pytest.approx(asdict(FITTED.exposures[key])), key


def test_every_layer_that_was_left_out_is_predicted_within_5_percent(held_out):
    assert misses(held_out) == []
    for model in ("gpt3-175b", "llama2-70b"):
        for M in (2048, 4096, 8192):
            inside = [one for one in held_out if (one.model, one.M) == (model, M)]
            assert {one.strategy for one in inside} == set(CANDIDATES)
            # under "1" only what `auto` picks was measured, not each strategy of ours
            assert {one.strategy for one in inside if one.connections == "1"} >= {
                "serial", "megatron", "auto", "te",
            }  # fmt: skip


@pytest.mark.parametrize("known", ["gpt3-175b", "llama2-70b"])
def test_one_model_predicts_the_other(rows, known):
    constants = fit([row for row in rows if row.model == known])
    (other,) = {row.model for row in rows} - {known}
    for M in calibration.HELD_OUT_M:
        inside, _ = cell(rows, other, M)
        assert misses(predictions(inside, constants)) == []


def without_waves(monkeypatch):
    """Tiles of one element: no wave is ever partly empty."""
    monkeypatch.setattr(gemm, "TILES", {(1, 1): 1.0})


def without_accumulation(monkeypatch):
    def plain(hardware, N, K, M, dtype, constants=FITTED):
        return gemm.gemm_us(hardware, N, K, M, dtype, constants)

    monkeypatch.setattr(operator_cost, "wgrad_us", plain)
    monkeypatch.setattr(calibration, "wgrad_us", plain)


def with_nccl_twice_as_fast(monkeypatch):
    monkeypatch.setattr(calibration, "H200", replace(H200, nccl_gbps=2 * H200.nccl_gbps))


def with_slow_copy_engines(monkeypatch):
    monkeypatch.setattr(calibration, "H200", replace(H200, copy_gbps=H200.copy_gbps / 4))


@pytest.mark.parametrize(
    "broken",
    [without_waves, without_accumulation, with_nccl_twice_as_fast, with_slow_copy_engines],
)
def test_a_broken_model_misses_whatever_is_fitted(rows, monkeypatch, broken):
    broken(monkeypatch)
    assert misses(holdout(rows))


def test_the_committed_predictions_are_what_the_command_writes(held_out):
    lines = (MEASURED / "layer_predictions.jsonl").read_text().splitlines()
    for line, one in zip(lines, held_out, strict=True):
        committed = Prediction(**json.loads(line))
        assert (committed.model, committed.M) == (one.model, one.M)
        assert (committed.strategy, committed.connections) == (one.strategy, one.connections)
        assert committed.measured_us == pytest.approx(one.measured_us)
        assert committed.predicted_us == pytest.approx(one.predicted_us)


def test_the_page_has_the_tables_of_the_command(held_out):
    page = (DOCS / "simulator.md").read_text()
    assert table(held_out) in page
    assert published.table() in page
    assert published.kernels_table() in page


def test_a_layer_is_eight_operations(rows):
    inside, outside = cell(rows, "llama2-70b", 4096)
    assert len(inside) + len(outside) == len(rows)
    te = of_layer(inside, "te", "1")
    assert {(row.op, row.candidate) for row in te} == {
        (op, name) for op in ("qkv", "proj", "fc1", "fc2") for name in ("te_ring", "te")
    }
    problem = next(row.problem for row in te if row.op == "fc2" and row.backward)
    assert (problem.pattern, problem.layout) == ("ag_gemm", "nn")  # dy is gathered
    assert (problem.N_local, problem.K_local, problem.M) == (7168, 8192, 4096)


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"status": "ok"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl line 1: .*'M'.*flux-megatron bench"):
        load([path])


def test_tables_are_renewed_between_their_marks():
    page = "a\n<!-- layers -->\nold\n<!-- end of layers -->\nb\n"
    assert renew(page, "layers", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="<!-- rows -->"):
        renew(page, "rows", "new")


@pytest.mark.parametrize("one", published.PUBLISHED, ids=lambda one: one.cluster)
def test_published_ranges_and_predicted_ones_meet(one):
    """Nothing was fitted to them, so that they only have to overlap; E stays below 1."""
    for paper, ours in zip(
        (one.flux, one.te, one.flux_over_te), published.predicted(one), strict=True
    ):
        assert ours.low <= paper.high
        assert paper.low <= ours.high
    assert published.predicted(one)[0].high < 1


def pruned(rows, predict_us) -> tuple[int, list[str]]:
    """How many operations were measured with several plans, and those of which the tuner would
    leave out the fastest.
    """
    times: dict = {}
    for row in rows:
        plans = {"hopper": "hopper", "pipelined": "pipelined", "serial": "sequential"}
        if row.backward:  # what `sequential` does there is Megatron's way
            plans |= {"megatron": "sequential"}
            plans.pop("serial")
        if row.candidate in plans:
            of_plan = times.setdefault((row.problem, row.connections), {})
            of_plan[Plan(plans[row.candidate])] = row.median_us
    times = {key: of_plan for key, of_plan in times.items() if len(of_plan) > 1}
    lost = []
    for (problem, connections), measured in times.items():
        predicted = {plan: predict_us(problem, plan, H200) for plan in measured}
        best = min(measured, key=measured.__getitem__)
        if predicted[best] > tuner.HOPELESS * min(predicted.values()):
            lost.append(f"{problem}, connections {connections}: {best.strategy}")
    return len(times), lost


def test_the_tuner_measures_the_plans_that_won(rows):
    """It drops what the model says is hopeless: never the fastest of a measured operation."""
    count, lost = pruned(rows, plan_cost.plan_us)
    assert count >= 64
    assert lost == []


def test_a_model_that_drops_winners_is_seen(rows):
    def too_kind_to_sequential(problem, plan, hardware):
        us = plan_cost.plan_us(problem, plan, hardware)
        return us / 2 if plan.strategy == "sequential" else us

    assert pruned(rows, too_kind_to_sequential)[1]


def chosen(predict_us) -> dict[tuple[str, str, int, str], list[float]]:
    """How many times the fastest plan's time the plan takes that would be used unmeasured, by
    pattern, layout, ranks and connections: of all operations whose plans are shipped. Kinds of
    plans that an estimate alone shall not choose take no part.
    """
    entries, left_out = plan_cache.read_folder(REPOSITORY / "configs" / "tuned" / "h200")
    assert not left_out
    found: dict[tuple[str, str, int, str], list[float]] = {}
    for entry in entries:
        problem, where = entry.problem, entry.environment
        if problem.M_shard >= estimate.FEWEST_ROWS:
            times = {one.plan: one.median_us for one in entry.measured}
            safe = choice._safe(problem, [*times], [])
            plan = min(safe, key=lambda plan: predict_us(problem, plan, H200))
            key = (problem.pattern, problem.layout, problem.world_size, where.max_connections)
            found.setdefault(key, []).append(times[plan] / min(times.values()))
    return found


# measured when local rows were copied in front of the GEMMs (docs/decisions/0026)
HELD_UP = [("ag_gemm", "nn", 4, "1")]


def test_what_is_chosen_unmeasured_is_nearly_the_fastest():
    """Also with two ranks, of which the model has seen no row."""
    found = chosen(plan_cost.plan_us)
    assert {key[2:] for key in found} == {(2, "1"), (4, "1"), (4, "unset")}
    means = {key: statistics.mean(over) for key, over in found.items() if key not in HELD_UP}
    assert len(means) == 11
    assert max(means.values()) < 1.02
    assert max(max(over) for key, over in found.items() if key not in HELD_UP) < 1.2


def test_a_model_without_the_copy_engine_s_operations_is_seen(monkeypatch):
    monkeypatch.setattr(operator_cost._Prediction, "_operations_us", lambda self: 0.0)
    assert statistics.mean(chosen(operator_cost.predict_us)["gemm_rs", "nt", 4, "1"]) > 1.03
