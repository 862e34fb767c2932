"""How much slower the plan is that would be chosen without a measurement of the operation, over all
plans that are shipped: the entry itself is hidden, and those of the same M and shape.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flux_megatron.perf.hardware import H200, Hardware
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Plan, Problem
from flux_megatron.tuning import estimate, plan_cache, plan_cost
from flux_megatron.tuning.plan_entry import Entry

FOLDER = Path(__file__).parents[2] / "configs" / "tuned" / "h200"
STRATEGIES = ("sequential", "hopper", "fused", "pipelined", "low_latency", "signalled")


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    found, left_out = plan_cache.read_folder(FOLDER)
    assert not left_out
    return found


@pytest.fixture(autouse=True)
def _predicted_once(monkeypatch):
    """The model is the same in all tests, and most plans of an entry are asked for 40 times."""

    def plan_us(problem: Problem, plan: Plan, facts: Hardware, *, connections: str) -> float:
        assert facts is H200
        return predicted_us(problem, plan, connections)

    monkeypatch.setattr(estimate, "plan_us", plan_us)


@cache
def predicted_us(problem: Problem, plan: Plan, connections: str) -> float:
    return plan_cost.plan_us(problem, plan, H200, connections=connections)


def in_order(plans: list[Plan]) -> list[Plan]:
    """As the tuner would list them, whatever they took: entries have the fastest first."""

    def place(plan: Plan) -> tuple:
        numbers = plan.split_k_shards, plan.transport, plan.splits, plan.comm_rows
        return STRATEGIES.index(plan.strategy), *numbers, -plan.tile.block_n, -plan.tile.group_m

    return sorted(plans, key=place)


def others(entry: Entry, entries: list[Entry]) -> list[Entry]:
    """What is known of the same kind of problem, without this M and shape."""
    kind = replace(entry.problem, M=1, N=1, K=1)
    return [
        other for other in entries
        if replace(other.problem, M=1, N=1, K=1) == kind and other.problem != entry.problem
    ]  # fmt: skip


def regret(entries: list[Entry]) -> dict[str, float]:
    """Chosen over fastest, minus 1, by problem and setting."""
    found = {}
    for entry in entries:
        times = {one.plan: one.median_us for one in entry.measured}
        known = others(entry, entries)
        chosen = estimate.best(
            entry.problem, in_order([*times]), known, entry.environment.max_connections, H200
        )
        name = f"{entry.problem}, connections {entry.environment.max_connections}"
        found[name] = times[chosen] / min(times.values()) - 1
    return found


# What exceeds a tenth: `pipelined` instead of narrow tiles of `hopper`, with shards of 128 rows;
# and tiles of 192 columns whose estimate is a thousandth below that of 256 columns.
EXCEEDING = {
    "ag_gemm M=512 N=10240 K=8192 nt": 0.17,
    "ag_gemm M=4096 N=10240 K=8192 nt bfloat16 over 2 ranks on cuda, beside": 0.11,
}


def test_the_unmeasured_choice_costs_little(entries):
    """Over all that is shipped; operations that exceed a tenth are named."""
    found = regret(entries)
    assert len(found) == len(entries) >= 267
    assert statistics.median(found.values()) < 0.001
    assert statistics.mean(found.values()) < 0.006
    for name, over in found.items():
        bounds = [bound for operation, bound in EXCEEDING.items() if name.startswith(operation)]
        assert over < max(bounds, default=0.1), name
    for operation in EXCEEDING:
        assert max(over for name, over in found.items() if name.startswith(operation)) > 0.1


def uncorrected(monkeypatch):
    """The prediction alone."""
    monkeypatch.setattr(estimate, "_correction", lambda relative, known: 1.0)


def by_the_nearest(monkeypatch):
    """The plan that took the least at the nearest entry, as it is."""

    def best(problem, plans, entries, connections, facts):
        if not entries or problem.M_shard < estimate.FEWEST_ROWS:
            return plans[0]
        near = min(entries, key=lambda entry: estimate._distance(entry.problem, problem))
        return next((one.plan for one in near.measured if one.plan in plans), plans[0])

    monkeypatch.setattr(estimate, "best", best)


def with_all_alike(monkeypatch):
    """Far shapes weigh as much as near ones."""
    monkeypatch.setattr(estimate, "_distance", lambda one, other: 0.0)


def without_the_untried(monkeypatch):
    """An entry that did not try a plan says nothing of it."""
    monkeypatch.setattr(estimate.Ratios, "of", lambda self, relative: self.logs.get(relative))


def with_tiles_all_alike(monkeypatch):
    """Of the prediction that knows no plan's tile."""
    without = cache(lambda p, plan, setting: predict_us(p, plan, H200, connections=setting))
    monkeypatch.setattr(
        estimate, "plan_us", lambda p, plan, facts, *, connections: without(p, plan, connections)
    )


@pytest.mark.parametrize(
    "broken",
    [with_tiles_all_alike, uncorrected, by_the_nearest, with_all_alike, without_the_untried],
)
def test_a_worse_choice_is_seen(entries, monkeypatch, broken):
    broken(monkeypatch)
    found = regret(entries)
    exceeding = [name for name, over in found.items() if over > 0.1]
    assert len(exceeding) > 3  # two of the right choice
    assert max(found.values()) > 0.13
