"""Measuring is one decision of all ranks: whatever clocks, failures and wrong results do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import races
import torch
from races import FakeRace, agreed, defaults, measured, some_problem
from ranks import DEVICE, on_device_ranks

from flux_megatron.overlap import fused, registry
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import beside, tuner
from flux_megatron.tuning.beside import NoRoom
from flux_megatron.tuning.timing import Race, race

PLAIN, FUSED, PIPELINED = Plan("sequential"), Plan("fused"), Plan("pipelined")


@on_device_ranks(3)
def test_clocks_that_differ_give_one_plan(rank):
    """Each rank's clock has another favourite."""
    favourite = ("fused", "pipelined", "sequential")[rank]
    tuner.race = FakeRace(lambda name: 100.0 if name == favourite else 200.0 + rank)
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "fused", "pipelined")
    entry = measured(problem, plans)
    assert agreed(entry).plan.strategy == "fused", "the leader's"
    assert (entry.rounds, entry.untried) == (tuner.ROUNDS, 0)
    turns = [[""], [""], [""], ["sequential", "fused", "pipelined", tuner.AGAIN]]
    assert (tuner.race.turns, tuner.race.rounds) == (turns, [1, 1, 1, tuner.ROUNDS])


@on_device_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": "2"}, limit_s=20)
def test_a_failure_on_one_rank_fails_the_plan_on_all(rank):
    """It leaves a call open: the next plan needs a new workspace."""
    if rank == 1:
        fused.ag_gemm = mock.Mock(side_effect=MemoryError("no room"))
    problem = some_problem("ag_gemm")
    entry = measured(problem, defaults(problem, "sequential", "fused", "pipelined"))
    (lost,) = agreed(entry).failed
    assert lost.plan.strategy == "fused"
    assert "rank 1: MemoryError: no room" in lost.reason
    assert "rank 0: SignalTimeout" in lost.reason
    assert {one.plan.strategy for one in entry.measured} == {"sequential", "pipelined"}


@on_device_ranks(2)
def test_a_plan_with_wrong_results_has_no_time(rank):
    right_gather, right_scatter = fused.ag_gemm, fused.start_gemm_rs

    def stale_rows(*given: object) -> torch.Tensor:
        y = right_gather(*given)
        y[-1] = y[0]
        return y

    def no_wgrad(*given: object) -> torch.Tensor:
        return right_gather(*given[:-1], lambda gathered: None)

    def with_nan(*given: object) -> SimpleNamespace:
        scatter, column = right_scatter(*given), torch.tensor([3], device=DEVICE)
        return SimpleNamespace(finish=lambda: scatter.finish().index_fill(1, column, torch.nan))

    for pattern, layout, wrong, name in [
        ("ag_gemm", "nt", stale_rows, "y"), ("ag_gemm", "nn", no_wgrad, "dw"),
        ("gemm_rs", "nn", with_nan, "y"),
    ]:  # fmt: skip
        fused.ag_gemm = wrong if pattern == "ag_gemm" else right_gather
        fused.start_gemm_rs = wrong if pattern == "gemm_rs" else right_scatter
        problem = some_problem(pattern, layout)
        entry = measured(problem, defaults(problem, "sequential", "fused"))
        (lost,) = entry.failed
        assert entry.plan.strategy == "sequential"
        assert f"ArithmeticError: {name} differs by up to" in lost.reason


@on_device_ranks(2)
def test_a_problem_beside_others_is_verified_alone_and_raced_beside(rank):
    problem = replace(some_problem("ag_gemm"), beside=True)
    plans = defaults(problem, "sequential", "pipelined")
    tuner.race = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0)
    entry = measured(problem, plans)
    flags = tuner.race.beside
    tuner.race = FakeRace(lambda name: 1.0)
    measured(replace(problem, beside=False), plans)
    assert flags == [False, False, True]
    assert not any(tuner.race.beside)
    assert entry.problem.beside
    assert entry.plan.strategy == "pipelined"


@on_device_ranks(2)
def test_plans_are_measured_beside_others(rank):
    for problem in (some_problem("gemm_rs"), some_problem("ag_gemm", "nn")):
        plans = defaults(problem, "sequential", "pipelined")
        entry = agreed(measured(replace(problem, beside=True), plans))
        assert entry.failed == ()
        assert {one.plan.strategy for one in entry.measured} == {"sequential", "pipelined"}


@on_device_ranks(2)
def test_no_room_for_the_blocks_beside_is_no_measurement(rank):
    beside._block = mock.Mock(side_effect=NoRoom("no bytes for an all-reduce beside"))
    problem = replace(some_problem("ag_gemm"), beside=True)
    assert measured(problem, defaults(problem, "sequential", "pipelined")) is None


@on_device_ranks(2, limit_s=240)
def test_every_kind_of_problem_is_measured_and_right(rank):
    for pattern in Pattern:
        for layout in ("nt", "nn"):
            problem = some_problem(pattern, layout, 24, "bfloat16")
            names, _ = registry.overlapping(problem, "auto", None)
            entry = agreed(measured(problem, tuner.candidates(problem, names)))
            found_names = {one.plan.strategy for one in entry.measured}
            assert found_names == {"sequential", *names}, (problem, entry.failed)
            assert entry.failed == ()
            assert {*registry.STRATEGIES[pattern]} - {"hopper"} <= found_names
            assert all(one.median_us > 0 for one in entry.measured)


@on_device_ranks(2)
def test_no_room_for_operands_on_one_rank_is_known_to_all(rank):
    if rank == 1:
        races.Trial = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
    problem = some_problem("ag_gemm")
    assert measured(problem, defaults(problem, "sequential", "fused")) is None


@on_device_ranks(2)
def test_a_plan_that_fails_later_does_not_take_the_others_with_it(rank):
    """A plan that was right at first fails among the others."""
    fails = mock.Mock(side_effect=RuntimeError("tired"))

    def tired(candidates, **options) -> Race:
        return race({n: fails if "pipelined" in n else c for n, c in candidates.items()}, **options)

    tuner.race = tired
    problem = some_problem("ag_gemm")
    entry = agreed(measured(problem, defaults(problem, "sequential", "pipelined", "fused")))
    assert [lost.plan.strategy for lost in entry.failed] == ["pipelined"]
    assert {one.plan.strategy for one in entry.measured} == {"sequential", "fused"}
    assert entry.untried == 0


def test_every_strategys_default_comes_first(monkeypatch):
    problem = Problem(Pattern.AG_GEMM, 64, 4 * 12288, 12288, "bfloat16", 4)
    variants = {"fused": [FUSED, Plan("fused", 32)], "pipelined": [PIPELINED, Plan("pipelined", 8)]}
    monkeypatch.setattr(registry, "candidates", lambda problem, name: variants[name])
    everything = [PLAIN, FUSED, PIPELINED, Plan("fused", 32), Plan("pipelined", 8)]
    assert tuner.candidates(problem, ["fused", "pipelined"]) == everything
