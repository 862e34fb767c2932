"""The tiles of GEMM+RS, one after another, beside what they took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flux_megatron.kernels import hopper_config, hopper_gemm, launch
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.overlap import hopper
from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.operator_cost import gemms_us, predict_us
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import plan_cache, plan_cost, scatter_tiles, tiles, tuner

FOLDER = Path(__file__).parents[2] / "configs" / "tuned" / "h200"
WIDE = replace(hopper_config.TILE, group_m=16)
SMALL = Problem(Pattern.GEMM_RS, 512, 512, 2 * 64, "bfloat16", 2)  # a shard of 2 x 2 tiles
TILE_GBPS = 128 * 256 * 2 / 1e3  # one tile a microsecond
WHOLE = Plan("hopper", 256, WIDE)
HALVES = Plan("hopper", 128, WIDE)  # a column of tiles each
MACHINE = scatter_tiles._Machine(132, 840.0, 10.5, 386.0, 4.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _drawn_again() -> Iterator[None]:
    scatter_tiles._tiles_us.cache_clear()
    yield
    scatter_tiles._tiles_us.cache_clear()


@pytest.fixture
def by_hand(monkeypatch):
    """`tiles_us` of SMALL on `sms` SMs that take 1 us a tile; a shard's bytes take 1 us, a push 1
    us more, a signal half of one.
    """
    plain = replace(FITTED, gemm_rate=1.0, tile_us=0.0)
    for module in (scatter_tiles, tiles):
        monkeypatch.setattr(module, "FITTED", plain)

    def tiles_us(plan: Plan, sms: int, begin_us: float = 0.0) -> float:
        machine = replace(
            H200, sms=sms, tflops={"bfloat16": sms * 2 * 128 * 256 * 64 / 1e6},
            copy_latency_us=1.0, copy_gbps=4 * TILE_GBPS, launch_us=0.5,
            store_gbps=sms * TILE_GBPS,
        )  # fmt: skip
        return scatter_tiles.tiles_us(SMALL, plan, machine, begin_us)

    return tiles_us


def test_by_copy_engine(by_hand):
    """Remote tiles end at 1 us, their push 2 us later; sums are behind the main loops."""
    assert by_hand(WHOLE, 4) == pytest.approx(1 + 2 + scatter_tiles.FETCH_US)
    # the second push begins when the first one's bytes, and most of its latency, are over
    second = 1 + 2 * (0.5 + tiles.PUSH_SHARE) + 1 - tiles.PUSH_SHARE
    assert by_hand(HALVES, 4) == pytest.approx(second + scatter_tiles.FETCH_US)
    assert by_hand(WHOLE, 4, begin_us=10.0) == pytest.approx(10 + 2 + scatter_tiles.FETCH_US)


def test_a_first_half_that_is_sent_early_is_worth_it(by_hand):
    """Two SMs: columns end at 1 and 2 us. A sum beside the main loop costs ADD_US."""
    add = scatter_tiles.ADD_US
    assert by_hand(WHOLE, 2) == pytest.approx(2 + 2 + add + 1 + add)  # the first pair waits
    assert by_hand(HALVES, 2) == pytest.approx(2 + 2 * (1 + add))  # nobody waits


def test_by_stores_of_the_sms(by_hand):
    """They take 1 us more a tile; the link then takes them one after another."""
    plan = replace(WHOLE, transport="sm")
    assert by_hand(plan, 4) == pytest.approx(2 + 1 + 0.5 + scatter_tiles.FETCH_US)


@pytest.mark.parametrize("tile", [hopper_config.TILE, WIDE, hopper_config.NARROW])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(("M_shard", "N"), [(256, 3072), (1000, 2560), (2048, 12288)])
@pytest.mark.parametrize("comm_tiles", [1, 2, 8, 100])
def test_the_order_is_the_kernel_s(M_shard, N, world_size, tile, comm_tiles):
    """When the last tile of each communication tile is made, and which tiles it has."""
    shape = cdiv(M_shard, tile.block_m), cdiv(N, tile.block_n)
    remote, local = scatter_tiles._order(*shape, tile.group_m, world_size - 1, comm_tiles)
    count = tiles_of_shard(M_shard, N, tile)
    tiles_comm = cdiv(count, min(hopper_gemm.COMM_TILES_MAX, comm_tiles))
    made = hopper_gemm.last_made(M_shard, N, world_size, tiles_comm, tile)
    assert {place: at for at, place in enumerate(remote)} == made
    assert local == [n // tiles_comm for n in range(count)]
    pushed = scatter_tiles._pushed([(place, 0.0) for place in remote], 1, MACHINE)
    assert [*pushed] == sorted(made, key=made.__getitem__)


def test_a_backward_gathers_first_and_ends_with_wgrad():
    forward = Problem(Pattern.GEMM_RS, 4096, 12288, 12288, "bfloat16", 4)
    backward = replace(forward, layout="nn")
    plan = hopper.default_plan(forward)
    _, wgrad = gemms_us(backward, H200)
    longer = plan_cost.plan_us(backward, plan, H200) - plan_cost.plan_us(forward, plan, H200)
    assert longer >= wgrad > 0


def test_other_plans_are_predicted_as_before():
    scattered = Problem(Pattern.GEMM_RS, 4096, 12288, 12288, "bfloat16", 4)
    for plan in (Plan("pipelined"), Plan("sequential"), Plan("fused")):
        assert plan_cost.plan_us(scattered, plan, H200) == predict_us(scattered, plan, H200)
    summed = replace(scattered, pattern=Pattern.GEMM_AR)
    plan = hopper.default_plan(summed)
    assert plan_cost.plan_us(summed, plan, H200) == predict_us(summed, plan, H200)


def measured() -> list[tuple[Problem, str, dict[Plan, float]]]:
    """The plans of `hopper` that were measured alone, by problem and setting, in their order."""
    found, _ = plan_cache.read_folder(FOLDER)
    entries = []
    for entry in found:
        times = {m.plan: m.median_us for m in entry.measured if m.plan.strategy == "hopper"}
        if entry.problem.spec.scatters and times and not entry.problem.beside:
            ordered = sorted(times, key=lambda plan: plan.dumps())
            entries.append((
                entry.problem,
                entry.environment.max_connections,
                {plan: times[plan] for plan in ordered},
            ))  # fmt: skip
    assert len(entries) > 80
    return entries


def regrets(predict) -> list[float]:
    """How much longer than the fastest the plan takes for which `predict` says least."""
    return [
        times[min(times, key=lambda plan: predict(problem, plan, H200, connections=setting))]
        / min(times.values()) - 1
        for problem, setting, times in measured()
    ]  # fmt: skip


def test_as_measured():
    """From 256 rows a shard; below, the model does not know how long few rows take."""
    errors = [
        abs(plan_cost.plan_us(problem, plan, H200, connections=setting) / us - 1)
        for problem, setting, times in measured()
        for plan, us in times.items()
        if problem.M_shard >= 256
    ]
    assert statistics.mean(errors) < 0.031
    assert max(errors) < 0.17


def test_the_plan_that_promises_most_is_nearly_the_fastest():
    """Of all shipped GEMM+RS, the choice among the plans of `hopper`, without any correction."""
    found = regrets(plan_cost.plan_us)
    assert statistics.mean(found) < 0.005
    assert sum(over > 0.1 for over in found) <= 1
    # waves of one tile, shares of a kernel instead of communication tiles
    before = regrets(predict_us)
    assert statistics.mean(before) > 0.03
    assert sum(over > 0.1 for over in before) > 10


def test_the_tuner_measures_the_plans_that_won():
    """What it leaves out as hopeless is never the fastest of a shipped entry."""
    found, _ = plan_cache.read_folder(FOLDER)
    for problem, times in ((e.problem, e.measured) for e in found if e.problem.spec.scatters):
        predicted = {one.plan: plan_cost.plan_us(problem, one.plan, H200) for one in times}
        best = min(times, key=lambda one: one.median_us).plan
        if best != Plan("sequential"):  # it is always measured
            assert predicted[best] <= tuner.HOPELESS * min(predicted.values()), problem


def nobody_waits(monkeypatch):
    """A local tile takes what has not come."""
    summed = scatter_tiles._summed_us
    monkeypatch.setattr(
        scatter_tiles, "_summed_us",
        lambda begin, us, arrivals, late: summed(begin, us, [0.0] * len(arrivals), late),
    )  # fmt: skip


def copies_cost_no_latency(monkeypatch):
    instant = partial(replace, H200, copy_latency_us=0.0)
    monkeypatch.setattr(f"{__name__}.H200", instant())


def stores_cost_nothing(monkeypatch):
    monkeypatch.setattr(f"{__name__}.H200", replace(H200, store_gbps=1e9))


def the_last_shard_first(monkeypatch):
    """The tiles of remote shards the other way round."""
    order = scatter_tiles._order

    def late_order(*sizes):
        remote, local = order(*sizes)
        return remote[::-1], local

    monkeypatch.setattr(scatter_tiles, "_order", late_order)


@pytest.mark.parametrize(
    "broken", [nobody_waits, copies_cost_no_latency, stores_cost_nothing, the_last_shard_first]
)
def test_a_worse_model_is_seen(monkeypatch, broken):
    broken(monkeypatch)
    assert statistics.mean(regrets(plan_cost.plan_us)) > 0.006


def test_short_sums_over_two_ranks_are_pushed_in_quarters_or_by_sms(monkeypatch):
    monkeypatch.setattr(launch, "sms", lambda device: 132)

    def tried(M: int, K_local: int, world_size: int = 2) -> set[tuple[str, int]]:
        """Transports, and communication tiles of a shard."""
        N, K = 8192, world_size * K_local
        problem = Problem(Pattern.GEMM_RS, M, N, K, "bfloat16", world_size)
        plans = [hopper.default_plan(problem), *hopper.candidates(problem)]
        whole = [plan for plan in plans if not plan.split_k_shards]
        return {(plan.transport, cdiv(problem.M_shard, plan.comm_rows)) for plan in whole}

    halves, quarters, by_sm = ("copy_engine", 2), ("copy_engine", 4), ("sm", 8)
    assert tried(8192, 1024) == {halves, quarters, by_sm}
    assert tried(8192, 2048) == tried(8192, 4096) == {halves, quarters}
    assert tried(8192, 6144) == tried(8192, 1024, world_size=4) == {halves}
    assert tried(1024, 8192) == {halves, by_sm}
