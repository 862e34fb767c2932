"""The tiles of AG+GEMM, one after another, beside what they took."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flux_megatron.kernels import hopper_config, launch
from flux_megatron.kernels.split_k import SplitK, split_k_of_gather
from flux_megatron.overlap import hopper
from flux_megatron.perf.constants import FITTED
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import gather_tiles, plan_cost, tiles

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "h200x2"
WIDE = replace(hopper_config.TILE, group_m=16)
# as the rows name them
NAMED = {
    "wide, groups of 16": WIDE,
    "wide, groups of 8": replace(hopper_config.TILE, group_m=8),
    "narrow": hopper_config.NARROW,
}
# 192 tiles of the local shard, whose GEMM is shorter than the gather of the other
LONG_GATHER = Problem(Pattern.AG_GEMM, 8192, 2 * 1536, 4096, "bfloat16", 2)
LOST_MOST = 0.003  # on average, by the choice of tiles
SMALL = Problem(Pattern.AG_GEMM, 512, 512, 64, "bfloat16", 2)  # two tiles a shard


@pytest.fixture
def by_hand(monkeypatch) -> Iterator:
    """`tiles_us` on `sms` SMs that take 1 us for a tile of SMALL; 128 rows of it take `rows_us` to
    come, a push 1 us more.
    """
    plain = replace(FITTED, gemm_rate=1.0, tile_us=0.0)
    for module in (gather_tiles, tiles):
        monkeypatch.setattr(module, "FITTED", plain)
    gather_tiles._tiles_us.cache_clear()

    def tiles_us(plan: Plan, sms: int, problem: Problem = SMALL, rows_us: float = 1.0) -> float:
        machine = replace(
            H200, sms=sms, tflops={"bfloat16": sms * 2 * 128 * 256 * 64 / 1e6},
            copy_latency_us=1.0, copy_gbps=128 * 64 * 2 / 1e3 / (rows_us or 1e-9),
        )  # fmt: skip
        return gather_tiles.tiles_us(problem, plan, machine)

    yield tiles_us
    gather_tiles._tiles_us.cache_clear()


def test_a_tile_waits_for_its_rows_and_for_its_sm(by_hand):
    """With two pushes the first tile row comes at 2 us, the second a share of a latency later."""
    whole, halves = Plan("hopper", 0, WIDE), Plan("hopper", 128, WIDE)
    second = 1 + 1 + tiles.PUSH_SHARE + 1
    assert by_hand(whole, 4) == pytest.approx(1 + 2 + 1)
    assert by_hand(halves, 4) == pytest.approx(second + 1)
    assert by_hand(halves, 1) == pytest.approx(second + 1)
    assert by_hand(whole, 1) == pytest.approx(1 + 2 + 2)


def test_pushes_to_other_peers_come_before(by_hand):
    """Of the shards of three peers, the last comes behind two others."""
    four = replace(SMALL, M=4 * 256, N=4 * 256, world_size=4)
    last = 3 * 2 + 1 + 2 * tiles.PUSH_SHARE
    assert by_hand(Plan("hopper", 0, WIDE), 8, four) == pytest.approx(last + 1)


def test_a_tile_of_rows_in_parts_begins_with_the_first_part(by_hand):
    """The row of two tiles takes 4 us to come, in four pushes. Two SMs make the local tiles at
    once; the remote ones, of 1 us, end a part's share after the last part.
    """
    whole, parts = (Plan("hopper", 0, WIDE, splits=splits) for splits in (0, 4))
    sent = 1 + 3 * tiles.PUSH_SHARE + 4
    assert by_hand(whole, 4, rows_us=2.0) == pytest.approx(1 + 4 + 1)
    assert by_hand(parts, 4, rows_us=2.0) == pytest.approx(sent + 1 / 4)
    assert by_hand(parts, 4, rows_us=0.0) == pytest.approx(1 + 3 * tiles.PUSH_SHARE + 1 / 4)


def test_rows_in_parts_of_k_are_tried_where_few_rows_have_long_k(monkeypatch):
    monkeypatch.setattr(launch, "sms", lambda device: 132)

    def tried(M: int, K: int) -> set[tuple[int, int]]:
        problem = Problem(Pattern.AG_GEMM, M, 2 * 5120, K, "bfloat16", 2)
        plans = [plan for plan in hopper.candidates(problem) if plan.splits]
        assert {plan.splits for plan in plans} <= {4}
        return {(plan.tile.block_m, plan.tile.block_n) for plan in plans}

    assert tried(256, 2048) == tried(1024, 8192) == {(128, 256), (128, 192), (128, 128)}
    assert tried(112, 2048) == {(64, 192), (64, 160), (64, 128), (64, 64)}
    assert tried(256, 2047) == tried(112, 1024) == tried(2048, 8192) == set()


def test_parts_of_k_come_to_all_peers_in_turn(by_hand):
    """Of four ranks: the last part of the last peer is the twelfth push of a rank."""
    four = replace(SMALL, M=4 * 256, N=4 * 256, world_size=4)
    last = 1 + 11 * tiles.PUSH_SHARE + 3 * 2
    assert by_hand(Plan("hopper", 0, WIDE, splits=4), 8, four) == pytest.approx(last + 1 / 4)


def test_parts_of_a_tile_are_added_by_one_cta(by_hand, monkeypatch):
    """A tile a shard, of 16 us; that of the local shard is split, and the remote one comes soon."""
    long, plan = replace(SMALL, M=256, K=16 * 64), Plan("hopper", 0, WIDE)
    early = replace(plan, split_k_shards=1)
    assert split_k_of_gather(1, 2, 1, 16, 4).early_parts == 2
    assert by_hand(plan, 4, long, rows_us=0.0) == pytest.approx(1 + 16)
    assert by_hand(early, 4, long, rows_us=0.0) == pytest.approx(1 + 16)  # on a third SM
    monkeypatch.setattr(gather_tiles, "FIX_UP_US", 20.0)
    gather_tiles._tiles_us.cache_clear()
    assert by_hand(early, 4, long, rows_us=0.0) == pytest.approx(8 + 20)


def test_in_the_last_wave_nothing_hides_that_parts_are_awaited(by_hand, monkeypatch):
    """Three tiles of 16 us for two SMs: the third is cut in two."""
    long = replace(SMALL, M=384, N=256, K=16 * 64, world_size=1)
    monkeypatch.setattr(gather_tiles, "_split_k", lambda *_: SplitK(3, 2, last_parts=2))
    last_us = gather_tiles.FIX_UP_US + gather_tiles.LAST_WAVE_US
    assert by_hand(Plan("hopper", 0, WIDE), 2, long) == pytest.approx(16 + 8 + last_us, rel=1e-3)


def test_few_rows_take_as_long_as_their_weight():
    one_rank = Problem(Pattern.AG_GEMM, 64, 12288, 12288, "bfloat16", 1)
    low = replace(WIDE, block_m=64, block_n=192)
    weight_us = 12288 * 12288 * 2 / H200.memory_gbps * 1e-3
    assert 1 <= gather_tiles.tiles_us(one_rank, Plan("hopper", 0, low), H200) / weight_us < 1.2


def test_other_plans_are_predicted_as_before():
    for plan in (Plan("pipelined"), Plan("sequential"), Plan("fused")):
        assert plan_cost.plan_us(LONG_GATHER, plan, H200) == predict_us(LONG_GATHER, plan, H200)


def test_a_first_half_that_comes_in_time_is_worth_it():
    whole, halves = (Plan("hopper", rows, WIDE) for rows in (0, 2048))
    gain = 1 - plan_cost.plan_us(LONG_GATHER, halves, H200) / plan_cost.plan_us(
        LONG_GATHER, whole, H200
    )
    assert gain > 0.1


def told() -> dict[str, dict[str, tuple[float, float]]]:
    """What the plans of these rows took, and the model's word, by shape: none of them is among
    those that the model's numbers are from.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for line in (FOLDER / "first_arrival.jsonl").read_text().splitlines():
        row = json.loads(line)
        name, _, pushes = row["plan"].rpartition(", ")
        if name in NAMED:
            sizes, layout = row["shape"].split()
            M, N, K = map(int, sizes.split("x"))
            assert layout in ("nt", "nn"), "of either, AG+GEMM alone"
            problem = Problem(Pattern.AG_GEMM, M, 2 * N, K, "bfloat16", 2)
            parts = int(pushes.split()[0])
            plan = Plan("hopper", 0 if parts == 1 else M // 2 // parts, NAMED[name])
            said = plan_cost.plan_us(problem, plan, H200)
            found.setdefault(row["shape"], {})[row["plan"]] = row["median_us"], said
    assert len(found) >= 6
    return found


def test_as_measured():
    """The fastest plan by the model is at most 1 % slower than the fastest of all. Operands of
    these rows are mostly zeros: GEMMs are up to 14 % faster than the model's.
    """
    errors = []
    for shape, plans in told().items():
        errors += [said / took - 1 for took, said in plans.values()]
        chosen = min(plans.values(), key=lambda pair: pair[1])
        assert chosen[0] <= 1.01 * min(took for took, _ in plans.values()), shape
    assert max(map(abs, errors)) < 0.2
    assert statistics.mean(map(abs, errors)) < 0.12


def alone() -> dict[tuple, dict[str, dict]]:
    """Rows of GEMMs alone with each tile of the kernel, by shape."""
    found: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for name in ("gemm_slices", "gemm_groups", "quack"):  # the newer rows of a shape count
        newer: dict[tuple, dict[str, dict]] = defaultdict(dict)
        for row in map(json.loads, (FOLDER.parent / "h200" / f"{name}.jsonl").open()):
            if row["table"] == "gemm_tiles" and row["commit"] not in ("d6c444a", "1684d25"):
                newer[row["M"], row["N"], row["K"], row["layout"]][row["tile"]] = row
        found |= newer
    assert len(found) >= 140
    return found


def lost(shape: tuple, rows: dict[str, dict]) -> float:
    """What the chosen tile takes over the fastest."""
    M, N, K, layout = shape
    tile = gather_tiles.tile_alone(M, N, K, torch.bfloat16, layout)
    times = [row["median_us"] for row in rows.values() if row["candidate"] == "ours"]
    name = f"{tile.block_m}x{tile.block_n}" + ", 3 stages" * (tile == hopper_config.LONG)
    return rows[name]["median_us"] / min(times) - 1


def test_a_gemm_alone_takes_a_tile_that_fits():
    """The rates are fitted to the same rows."""
    over = {shape: lost(shape, rows) for shape, rows in alone().items()}
    assert statistics.mean(over.values()) < LOST_MOST
    assert max(over.values()) < 0.07
    chosen = {gather_tiles.tile_alone(*shape[:3], torch.bfloat16, shape[3]) for shape in over}
    assert chosen == {*hopper_config.TILES, hopper_config.LONG}, "each is the choice of some"


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (tiles, "RATES", {}), (gather_tiles, "LAST_WAVE_US", 0.0),
        (gather_tiles, "LOW_PARTS", 1.0), (gather_tiles, "FIX_UP_US", 3.0),
    ],
)  # fmt: skip
def test_a_worse_tile_is_seen(monkeypatch, module, name, broken):
    monkeypatch.setattr(module, name, broken)
    gather_tiles._tiles_us.cache_clear()
    over = [lost(shape, rows) for shape, rows in alone().items()]
    gather_tiles._tiles_us.cache_clear()
    assert statistics.mean(over) > 3 * LOST_MOST


def ratio_of_160_columns() -> float:
    """Of what dgrads took to what the model says, with tiles of 160 columns."""
    gather_tiles._tiles_us.cache_clear()
    ratios = []
    for (M, N, K, layout), rows in alone().items():
        problem = Problem(Pattern.AG_GEMM, M, N, K, "bfloat16", 1, layout)
        for tile in hopper_config.TILES:
            if layout == "nn" and tile.block_n == 160:
                said = gather_tiles.tiles_us(problem, Plan("hopper", tile=tile), H200)
                ratios.append(rows[f"{tile.block_m}x160"]["median_us"] / said)
    gather_tiles._tiles_us.cache_clear()
    return statistics.mean(ratios)


def test_rows_of_32_columns_are_slow_to_fetch(monkeypatch):
    assert 0.95 < ratio_of_160_columns() < 1.05
    monkeypatch.setattr(tiles, "NN_32", 1.0)
    assert ratio_of_160_columns() > 1.05
