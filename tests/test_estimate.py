"""The choice without a measurement: predictions, corrected by what was measured of other shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flux_megatron.perf.hardware import H200
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import estimate, plan_cache
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_cost import plan_us
from flux_megatron.tuning.plan_entry import Entry, Measured

HERE = Environment("NVIDIA H200", "nvlink", "580.65.06", "13.0", "2.11.0", "3.6.0", "1", "abc")
PROBLEM = Problem(Pattern.GEMM_RS, 4096, 12288, 12288, "bfloat16", 4)
PLAIN, FUSED, PIPELINED = Plan("sequential"), Plan("fused"), Plan("pipelined")
PLANS = [PLAIN, FUSED, PIPELINED]


def entry(problem: Problem, ratios: dict[Plan, float], connections: str = "1") -> Entry:
    """As if each plan had taken so many times its prediction."""
    measured = [Measured(p, r * plan_us(problem, p, H200)) for p, r in ratios.items()]
    measured.sort(key=lambda one: one.median_us)
    where = replace(HERE, max_connections=connections)
    return Entry(problem, where, measured[0].plan, tuple(measured), (), 0, 1.0, 12, "today")


def corrections(problem: Problem, plans: list[Plan], *entries: Entry) -> list[float]:
    found = estimate.estimates_us(problem, plans, entries, "1", H200)
    return [found[plan] / plan_us(problem, plan, H200) for plan in plans]


def test_without_entries_it_is_the_prediction():
    assert corrections(PROBLEM, PLANS) == [1, 1, 1]
    least = min(PLANS, key=lambda plan: plan_us(PROBLEM, plan, H200))
    assert estimate.best(PROBLEM, PLANS, [], "1", H200) == least != PLAIN


def test_a_neighbour_corrects_the_plans_that_it_measured():
    near = entry(replace(PROBLEM, M=2048), {PLAIN: 1.1, FUSED: 1.5})
    assert corrections(PROBLEM, PLANS, near) == pytest.approx([1.1, 1.5, 1])


def test_nearer_shapes_weigh_more():
    double = entry(replace(PROBLEM, M=2048), {FUSED: 1.2})
    for far in ({"M": 512}, {"N": 4 * 12288}, {"K": 12288 // 4}):
        both = corrections(PROBLEM, [FUSED], double, entry(replace(PROBLEM, **far), {FUSED: 2.0}))
        assert 1.2 < both[0] < 1.5
    setting = entry(replace(PROBLEM, M=2048), {FUSED: 2.0}, connections="unset")
    assert 1.2 < corrections(PROBLEM, [FUSED], double, setting)[0] < 1.5
    same = entry(PROBLEM, {FUSED: 1.3})
    assert corrections(PROBLEM, [FUSED], double, same)[0] == pytest.approx(1.3, abs=0.01)


def test_communication_tiles_correspond_by_how_many_a_shard_has():
    half, tenth = Plan("hopper", comm_rows=512), Plan("hopper", comm_rows=100)
    there = {Plan("hopper", comm_rows=1024): 1.2, Plan("hopper"): 1.4, FUSED: 1.1}
    near = entry(replace(PROBLEM, M=8192), there)
    whole = Plan("hopper", comm_rows=1024)  # at M = 4096
    # a plan that was not tried there is as bad as the worst of its strategy
    assert corrections(PROBLEM, [half, whole, tenth], near) == pytest.approx([1.2, 1.4, 1.4])


def test_shards_of_few_rows_take_sequential_unless_others_were_measured():
    few = replace(PROBLEM, M=512)
    assert few.M_shard < estimate.FEWEST_ROWS
    assert estimate.best(few, PLANS, [], "1", H200) == PLAIN

    def sequential_worse_by(ratio: float, M: int) -> Plan:
        """At that M; as good as the best of the others at `few` when 1."""
        plain, best = plan_us(few, PLAIN, H200), plan_us(few, FUSED, H200)
        near = entry(replace(PROBLEM, M=M), {PLAIN: ratio, FUSED: plain / best, PIPELINED: 9.0})
        return estimate.best(few, PLANS, [near], "1", H200)

    # with more rows only: a margin
    assert sequential_worse_by(1.05, 1024) == PLAIN
    assert sequential_worse_by(1.12, 1024) == FUSED
    # with as few: none
    assert sequential_worse_by(1.05, 512) == FUSED
    assert sequential_worse_by(0.98, 512) == PLAIN
    # with far more rows only: nothing is concluded
    assert sequential_worse_by(1.12, 2048) == FUSED
    assert sequential_worse_by(1.12, 4096) == PLAIN


def test_few_gathered_rows_take_the_plan_that_promises_most(monkeypatch):
    """Of those made for few rows, and by the margin; others wait for a measurement."""
    few = Problem(Pattern.AG_GEMM, 256, 24576, 12288, "bfloat16", 2)
    parts, one = Plan("hopper", splits=4), Plan("pipelined", splits=1)
    promised = {PLAIN: 100.0, parts: 95.0, one: 94.0, Plan("hopper"): 50.0, PIPELINED: 50.0}
    monkeypatch.setattr(estimate, "plan_us", lambda problem, plan, *_, **__: promised[plan])
    plans = [*promised]
    assert estimate.best(few, plans, [], "1", H200) == one
    promised[parts] = 90.0
    assert estimate.best(few, plans, [], "1", H200) == parts
    promised[parts] = promised[one] = 97.5
    assert estimate.best(few, plans, [], "1", H200) == PLAIN
    scattered = replace(few, pattern=Pattern.GEMM_RS)
    promised[one] = 50.0
    assert estimate.best(scattered, plans, [], "1", H200) == PLAIN, "its waits overlap nothing"


def test_beside_others_only_what_was_raced_there(monkeypatch):
    """AG+GEMM over two ranks, forward; `hopper` waits for no SM: its prediction holds better."""
    few = Problem(Pattern.AG_GEMM, 256, 24576, 12288, "bfloat16", 2, beside=True)
    promised = {PLAIN: 100.0, Plan("hopper"): 110.0, FUSED: 50.0, PIPELINED: 50.0}
    monkeypatch.setattr(estimate, "plan_us", lambda problem, plan, *_, **__: promised[plan])
    plans = [*promised]
    assert estimate.best(few, plans, [], "1", H200) == Plan("hopper")
    for other in ({"beside": False}, {"world_size": 4}, {"layout": "nn"}):
        assert estimate.best(replace(few, **other), plans, [], "1", H200) == PLAIN, other
    for pattern in (Pattern.GEMM_RS, Pattern.GEMM_AR):
        assert estimate.best(replace(few, pattern=pattern), plans, [], "1", H200) == PLAIN
    parts = Plan("hopper", splits=4)
    promised[parts] = 120.0
    assert estimate.best(few, [*promised], [], "1", H200) == parts
    promised[Plan("hopper")] = 128.0
    assert estimate.best(few, plans, [], "1", H200) == PLAIN


def test_the_first_of_equals_is_taken():
    wide = replace(FUSED, tile=Tile(group_m=16))
    assert estimate.best(PROBLEM, [FUSED, wide], [], "1", H200) == FUSED
    assert estimate.best(PROBLEM, [wide, FUSED], [], "1", H200) == wide


def hopper(problem: Problem, comm_rows: int = 0) -> Plan:
    return Plan("hopper", comm_rows, Tile(128, 256, 64, 16, 8, 3, tma=True))


@pytest.mark.parametrize(
    ("problem", "best", "before"),
    [
        (Problem(Pattern.GEMM_RS, 8192, 4096, 2 * 1024, "bfloat16", 2), "hopper", "hopper"),
        # 248 rows a shard
        (Problem(Pattern.AG_GEMM, 496, 2 * 12288, 12288, "bfloat16", 2), "pipelined", "sequential"),
        (Problem(Pattern.AG_GEMM, 4096, 2 * 7392, 8192, "bfloat16", 2), "pipelined", "hopper"),
    ],
)
def test_shapes_that_nobody_shipped(problem, best, before):
    """Measured outside of what is shipped; `before` is what the prediction alone says."""
    folder = Path(__file__).parents[1] / "configs" / "tuned"
    cache = plan_cache.PlanCache([folder], lambda strategy: HERE)
    plans = [PLAIN, FUSED, PIPELINED]
    if problem.M_shard % 128 == 0:
        rows = problem.M_shard // 2 if problem.pattern is Pattern.GEMM_RS else 0
        plans.insert(1, hopper(problem, rows))
    assert estimate.best(problem, plans, [], "1", H200).strategy == before
    assert estimate.best(problem, plans, cache.like(problem), "1", H200).strategy == best
