"""The plans of a layer kind by ranges of M, and which plans of `hopper` the tuner tries."""

from dataclasses import replace

import pytest

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import hopper, registry
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import plan_table
from flux_megatron.tuning.plan_table import RANGES, PlanTable, for_rows, problem_of, range_of

LAYER = Problem(Pattern.GEMM_RS, 4096, 5120, 25600, "bfloat16", 2)
NAMES = ["hopper", "fused", "pipelined", "signalled"]
HALVES = Plan("pipelined", comm_rows=1024)  # of a shard of 2048 rows
PLAIN = Plan("sequential")


def test_ranges_are_powers_of_two_and_every_m_has_one():
    assert [range_of(M) for M in (1, 64, 90, 91, 1448, 1449, 8192, 10**6)] == [
        6, 6, 6, 7, 10, 11, 13, 13
    ]  # fmt: skip
    assert {range_of(1 << number) for number in RANGES} == {*RANGES}
    assert problem_of(replace(LAYER, world_size=3), 6).M == 66, "whole shards"


def test_the_nearest_point_of_the_range_gives_the_plan():
    table = PlanTable({2048: PLAIN, 3072: HALVES, 4096: Plan("fused")})
    found = [table.plan(replace(LAYER, M=M), NAMES) for M in (2048, 2100, 3100, 5700)]
    assert [plan.strategy for plan in found] == [*["sequential"] * 2, "pipelined", "fused"]
    assert found[-1] == Plan("fused")
    far = PlanTable({4096: PLAIN})
    assert far.plan(replace(LAYER, M=16384), ["pipelined"]) == Plan("pipelined"), "by the rule"
    table = PlanTable({4096: Plan("hopper")})  # which cannot run this M
    assert table.plan(replace(LAYER, M=4097), ["pipelined"]) == Plan("pipelined")
    assert table.plan(replace(LAYER, M=4097), []) == PLAIN


def test_a_plan_keeps_its_share_of_rows():
    assert for_rows(HALVES, 4096, LAYER) == HALVES
    assert for_rows(HALVES, 4096, replace(LAYER, M=6000)).comm_rows == 1500
    assert for_rows(PLAIN, 4096, replace(LAYER, M=6000)) == PLAIN
    bands, on_cpu = Plan("signalled", group_rows=(512, 512)), replace(LAYER, M=6000, device="cpu")
    default = registry.strategy(on_cpu, "signalled").default_plan(on_cpu)
    assert for_rows(bands, 4096, on_cpu) == default


def test_the_second_range_of_training_races_all_of_them():
    table = PlanTable()
    assert table.unsettled(300) == [8]
    table.settled |= {8}
    assert table.unsettled(6000) == [13]
    table.points[8192] = PLAIN
    assert table.unsettled(5000) == [10, 11, 12]
    assert table.unsettled(7000) == []
    table.settled |= {10, 11, 12}
    assert all(table.unsettled(M) == [] for M in range(800, 20000, 100))
    assert table.unsettled(64) == [6], "few rows alone"


@pytest.mark.parametrize(
    ("M", "names", "strategy"),
    [
        (8192, NAMES, "hopper"), (1024, NAMES[1:], "fused"), (1023, NAMES, "sequential"),
        (64, ["low_latency", *NAMES], "low_latency"), (65, ["low_latency", *NAMES], "sequential"),
    ],
)  # fmt: skip
def test_the_rule_without_a_measurement(monkeypatch, M, names, strategy):
    monkeypatch.setattr(plan_table, "_default", lambda problem, name: Plan(name))
    assert plan_table.ruled(replace(LAYER, M=M), names).strategy == strategy
    gathers = replace(LAYER, pattern=Pattern.AG_GEMM, M=64)
    assert plan_table.ruled(gathers, ["low_latency", *NAMES]) == PLAIN


def test_the_rule_has_a_gemm_a_shard_for_blockwise_scales():
    blocks = replace(LAYER, dtype="float8_e4m3fn", out_dtype="bfloat16", blockwise=True)
    for M, plan in ((2048, Plan("pipelined")), (2047, PLAIN)):
        assert plan_table.ruled(replace(blocks, M=M), ["pipelined"]) == plan


def test_a_race_leaves_out_what_never_wins(monkeypatch):
    tried = {name: [Plan(name, comm_rows=rows) for rows in range(6)] for name in NAMES}
    monkeypatch.setattr(registry, "candidates", lambda problem, name: tried[name])
    assert plan_table.racers(LAYER, NAMES) == [PLAIN, *tried["hopper"][:4], *tried["pipelined"][:4]]
    few = plan_table.racers(replace(LAYER, M=512), ["pipelined", "signalled"])
    assert few == [PLAIN, *tried["pipelined"][:4]]
    assert plan_table.racers(LAYER, ["signalled"]) == [PLAIN, *tried["signalled"][:4]]
    assert Plan("fused") in plan_table.racers(LAYER, NAMES[1:])


def test_rows_in_parts_of_k_are_tried_where_few_rows_have_long_k():
    def tried(M: int, K: int) -> set[tuple[int, int]]:
        problem = Problem(Pattern.AG_GEMM, M, 2 * 5120, K, "bfloat16", 2)
        plans = [plan for plan in hopper.candidates(problem) if plan.splits]
        assert {plan.splits for plan in plans} <= {4}
        return {(plan.tile.block_m, plan.tile.block_n) for plan in plans}

    assert tried(256, 2048) == tried(1024, 8192) == {(128, 256), (128, 128)}
    assert tried(112, 2048) == {(64, 128), (64, 64)}
    assert tried(256, 2047) == tried(112, 1024) == tried(2048, 8192) == set()


def test_short_sums_over_two_ranks_are_pushed_in_quarters_or_by_sms():
    def tried(M: int, K_local: int, world_size: int = 2) -> set[tuple[str, int]]:
        """Transports, and communication tiles of a shard."""
        problem = Problem(Pattern.GEMM_RS, M, 8192, world_size * K_local, "bfloat16", world_size)
        plans = [hopper.default_plan(problem), *hopper.candidates(problem)]
        return {(plan.transport, cdiv(problem.M_shard, plan.comm_rows)) for plan in plans}

    halves, quarters, by_sm = ("copy_engine", 2), ("copy_engine", 4), ("sm", 8)
    assert tried(8192, 1024) == {halves, quarters, by_sm}
    assert tried(8192, 2048) == tried(8192, 4096) == {halves, quarters}
    assert tried(8192, 6144) == tried(8192, 1024, world_size=4) == {halves}
    assert tried(1024, 8192) == {halves, by_sm}
