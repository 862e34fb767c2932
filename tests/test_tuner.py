"""Measuring is one decision of all ranks, whatever clocks, failures and wrong results do; and which
plan has won: ties, noise, and run-offs of what noise cannot tell apart.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from races import FakeRace, agreed, defaults, measured, some_problem
from ranks import DEVICE, here, on_device_ranks

from flux_megatron import errors
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.overlap import calls, fused, library_gemm, registry
from flux_megatron.overlap.transfer import GATHER, SCATTER
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import beside, plan_table, trial, tuner
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.timing import Race, race
from flux_megatron.tuning.trial import Trial

PLAIN, FUSED, PIPELINED = Plan("sequential"), Plan("fused"), Plan("pipelined")


def of_fused(other: Callable, right: Callable = calls.whole) -> Callable:
    """The function of `calls` where `other` makes the calls of `fused`."""
    builds = [*fused.BUILDERS.values()]
    return lambda build, *given: (other if build in builds else right)(build, *given)


def why_not_measured(problem: Problem, plans: list[Plan]) -> str:
    """The same on all ranks."""
    with pytest.raises(tuner.NotMeasured) as caught:
        measured(problem, plans)
    return agreed(str(caught.value))


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


@pytest.mark.parametrize(("M", "R"), [(513, 2), (3333, 4)])
def test_a_trial_takes_memory_for_whole_tiles_of_a_shard(M, R, monkeypatch):
    """Else a plan's first call grows its channel, where a rank that fails leaves the others."""
    taken, tile, N = {}, Tile(128, 128), 264
    monkeypatch.setattr(trial, "_reserve", lambda space, name, size, *_: taken.update({name: size}))
    one = object.__new__(Trial)
    one.problem, one._scaling = Problem(Pattern.GEMM_AR, M, N, 416, "bfloat16", R), None
    one._x = torch.empty(1, dtype=torch.bfloat16)
    one.reserve(SimpleNamespace(missing="no memory"))
    rows = cdiv(M, R)
    assert taken[SCATTER] >= R * tiles_of_shard(rows, N, tile) * tile.block_m * tile.block_n * 2
    assert taken[GATHER] >= R * rows * N * 2


@on_device_ranks(2, limit_s=20)
def test_a_failure_on_one_rank_fails_the_plan_on_all(rank):
    """It leaves a call open: the next plan needs a new workspace. The other rank waits for a bound
    of races, which is shorter than the group's.
    """
    trial.WAIT_S = 2.0
    if rank == 1:
        calls.whole = of_fused(mock.Mock(side_effect=MemoryError("no room")))
    problem = some_problem("ag_gemm")
    entry = measured(problem, defaults(problem, "sequential", "fused", "pipelined"))
    (lost,) = agreed(entry).failed
    assert lost.plan.strategy == "fused"
    assert "rank 1: MemoryError: no room" in lost.reason
    assert "rank 0: SignalTimeout" in lost.reason
    assert "waited 2 s for" in lost.reason
    assert {one.plan.strategy for one in entry.measured} == {"sequential", "pipelined"}


@on_device_ranks(2)
def test_a_plan_with_wrong_results_has_no_time(rank):
    right, right_start = calls.whole, calls.start

    def stale_rows(*given: object) -> torch.Tensor:
        y = right(*given)
        y[-1] = y[0]
        return y

    def no_wgrad(*given: object) -> torch.Tensor:
        *before, _, scaling = given
        return right(*before, lambda gathered: None, scaling)

    def with_nan(*given: object) -> SimpleNamespace:
        scatter, column = right_start(*given), torch.tensor([3], device=DEVICE)
        return SimpleNamespace(finish=lambda: scatter.finish().index_fill(1, column, torch.nan))

    for pattern, layout, wrong, name in [
        ("ag_gemm", "nt", stale_rows, "y"), ("ag_gemm", "nn", no_wgrad, "dw"),
        ("gemm_rs", "nn", with_nan, "y"),
    ]:  # fmt: skip
        calls.whole = of_fused(wrong, right) if pattern == "ag_gemm" else right
        calls.start = of_fused(wrong, right_start) if pattern == "gemm_rs" else right_start
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
def test_the_hosts_work_for_bands_counts(rank):
    tuner.race = FakeRace(lambda name: 1.0)
    for strategy, counts in (("signalled", True), ("pipelined", False)):
        tuner.race.with_host.clear()
        problem = some_problem("ag_gemm")
        measured(problem, defaults(problem, "sequential", strategy))
        assert tuner.race.with_host[-1] is counts


@on_device_ranks(2)
def test_no_room_for_the_blocks_beside_is_no_measurement(rank):
    beside._block = mock.Mock(side_effect=beside.NoRoom("no bytes for an all-reduce beside"))
    problem = replace(some_problem("ag_gemm"), beside=True)
    plans = defaults(problem, "sequential", "pipelined")
    assert why_not_measured(problem, plans) == "no bytes for an all-reduce beside"


@on_device_ranks(2, limit_s=240)
def test_every_kind_of_problem_is_measured_and_right(rank):
    for pattern in Pattern:
        for layout in ("nt", "nn"):
            problem = some_problem(pattern, layout, 24, "bfloat16")
            names = [*registry.runnable(problem, "auto", None)]
            plans = defaults(problem, "sequential", *names)
            if layout == "nt":
                plans = tuner.candidates(problem, names)
            entry = agreed(measured(problem, plans))
            found_names = {one.plan.strategy for one in entry.measured}
            assert found_names == {"sequential", *names}, (problem, entry.failed)
            assert entry.failed == ()
            assert {*registry.STRATEGIES[pattern]} - {"hopper"} <= found_names
            assert all(one.median_us > 0 for one in entry.measured)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@on_device_ranks(2)
def test_fp8_is_measured_and_right(rank, dtype):
    """By the plans that a race has, with either accumulator."""
    for pattern, split in itertools.product((Pattern.AG_GEMM, Pattern.GEMM_RS), (False, True)):
        problem = replace(
            some_problem(pattern, M=32, dtype=dtype), N=64, K=64, out_dtype="bfloat16",
            split_accumulator=split,
        )  # fmt: skip
        # GPUs multiply no two of e5m2; the CPU would
        assert Trial(problem, dist.group.WORLD, here())._w.dtype is torch.float8_e4m3fn
        names = [*registry.runnable(problem, "auto", None)]
        entry = agreed(measured(problem, plan_table.racers(problem, names)))
        assert entry.failed == ()
        assert {one.plan.strategy for one in entry.measured} >= {"sequential", "pipelined"}


@on_device_ranks(2)
def test_results_of_fp8_have_room(rank):
    """No call of a race makes a workspace grow, where another rank might have failed before."""
    problem = replace(
        some_problem("gemm_rs", M=512, dtype="float8_e4m3fn"), N=256, K=64, out_dtype="bfloat16"
    )
    given = Trial(problem, dist.group.WORLD, here())
    given.renew()
    channels = given._space.channels
    before = {name: one.region_bytes for name, one in channels.items()}
    given.outputs(PIPELINED)
    assert before == {name: one.region_bytes for name, one in channels.items()}
    given.close()


@on_device_ranks(2)
def test_no_room_for_operands_on_one_rank_is_known_to_all(rank):
    if rank == 1:
        tuner.Trial = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "fused")
    assert why_not_measured(problem, plans) == "rank 1: OutOfMemoryError: no room"


@pytest.mark.parametrize(("pattern", "layout"), [*itertools.product(Pattern, ("nt", "nn"))])
@on_device_ranks(2, limit_s=15)
def test_no_room_for_sequential_on_one_rank_is_known_before_a_collective(rank, pattern, layout):
    """The other rank would wait in it; and the group's own collectives go on."""
    problem = some_problem(pattern, layout)
    plans, taken = defaults(problem, "sequential", "pipelined"), []

    def gemm(*given: object) -> torch.Tensor:
        taken.append(given)
        raise torch.OutOfMemoryError("no room")

    name = "_gemm_nt" if layout == "nt" else "_gemm"
    with mock.patch.object(library_gemm, name, gemm if rank else getattr(library_gemm, name)):
        assert why_not_measured(problem, plans) == "rank 1: OutOfMemoryError: no room"
    assert len(taken) == rank
    assert agreed(measured(problem, plans)).failed == ()


@pytest.mark.parametrize(("renewals", "fails_at"), [(0, 1), (1, 1), (1, 2), (1, 3)])
@on_device_ranks(2)
def test_no_symmetric_memory_for_a_trial_is_no_measurement(rank, renewals, fails_at):
    """Not at its beginning, and not after a plan that failed, in its first turn or later."""
    problem = some_problem("ag_gemm")
    reserve, renewed = Trial.reserve, []

    def refuse(self: Trial, space: Workspace) -> None:
        if len(renewed) == renewals:
            raise errors.WorkspaceError("ranks cannot share memory")
        renewed.append(space)
        reserve(self, space)

    turns = [calls.whole] * (fails_at - 1) + [mock.Mock(side_effect=MemoryError("no room"))] * 9
    fails = mock.patch.object(calls, "whole", of_fused(lambda *given: turns.pop(0)(*given)))
    with mock.patch.object(Trial, "reserve", refuse), fails:
        said = why_not_measured(problem, defaults(problem, "sequential", "fused", "pipelined"))
    assert said == "WorkspaceError: ranks cannot share memory"
    assert len(renewed) == renewals


@on_device_ranks(2)
def test_where_sequential_fails_nothing_is_measured(rank):
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "pipelined")

    def learn_wrongly(self: Trial) -> None:
        self._expected = [torch.full((12, 12), torch.nan, device=DEVICE)]

    with mock.patch.object(Trial, "learn", learn_wrongly):
        said = why_not_measured(problem, plans)
    assert said.startswith("sequential failed: ArithmeticError: y differs by up to nan")
    fails = mock.Mock(side_effect=RuntimeError("tired"))

    def tired(candidates, **options) -> Race:
        return race({n: fails if n == tuner.AGAIN else c for n, c in candidates.items()}, **options)

    tuner.race = tired
    assert why_not_measured(problem, plans) == "sequential failed: RuntimeError: tired"


@on_device_ranks(2)
def test_a_plan_that_fails_later_does_not_take_the_others_with_it(rank):
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
    monkeypatch.setattr(registry, "candidates", lambda problem, name, missing: variants[name])
    everything = [PLAIN, FUSED, PIPELINED, Plan("fused", 32), Plan("pipelined", 8)]
    assert tuner.candidates(problem, ["fused", "pipelined"]) == everything


RUN_OFF_ROUNDS = tuner.RUN_OFF * tuner.ROUNDS


def settled(plain: list[float], again: list[float], other: list[float]) -> tuple[str, float]:
    times = {PLAIN.dumps(): plain, FUSED.dumps(): other, tuner.AGAIN: again}
    plan, noise_us = tuner.settle(times, PLAIN)
    return plan.strategy, noise_us


def test_the_fastest_wins():
    assert settled([100, 100, 100], [100, 100, 100], [99, 99, 99]) == ("fused", 0)
    times = {PLAIN.dumps(): [9, 9], tuner.AGAIN: [9, 9], FUSED.dumps(): [8, 8]}
    assert tuner.settle(times | {PIPELINED.dumps(): [7, 7]}, PLAIN)[0] == PIPELINED
    assert tuner.settle(times | {PIPELINED.dumps(): [8, 8]}, PLAIN)[0] == FUSED, "the first of two"


def test_sequential_wins_ties_and_what_is_within_its_noise():
    assert settled([100] * 3, [100] * 3, [100] * 3) == ("sequential", 0)
    assert settled([100, 104, 100], [103, 100, 104], [98] * 3) == ("sequential", 4)
    assert settled([100, 104, 100], [103, 100, 104], [95] * 3) == ("fused", 4)
    assert settled([100] * 3, [90] * 3, [85] * 3) == ("sequential", 10), "its better turn counts"
    lucky = [10, 101, 101, 101, 10]
    assert settled([100] * 5, [100] * 5, lucky)[0] == "sequential", "lucky rounds do not win"


def test_what_is_faster_in_nearly_every_round_wins_in_spite_of_noise():
    """Clocks change from turn to turn by more than the plans differ."""
    plain, again = [100, 120, 110, 90] * 3, [115, 100, 95, 110] * 3
    other = [a - 1 for a in map(min, plain, again)]
    assert settled(plain, again, other) == ("fused", 17.5)
    slower_in = [*other[:8], *([200] * 4)]
    assert settled(plain, again, slower_in)[0] == "sequential", "8 of 12 rounds may be chance"
    assert settled(plain[:4], again[:4], other[:4])[0] == "sequential", "4 rounds are too few"


def test_plans_that_are_as_fast_rarely_win():
    draw, won = random.Random(0), 0
    for _ in range(2000):
        times = ([draw.gauss(100, 5) for _ in range(tuner.ROUNDS)] for _ in range(3))
        won += settled(*times)[0] == "fused"
    assert won / 2000 < 3 * tuner.CHANCE  # by either rule


class NoisyClock(FakeRace):
    """`sequential`'s turns differ by 20 %; fused takes 96 or 105 us, `later` in a run-off."""

    def __init__(self, later: float) -> None:
        super().__init__(lambda name: 0.0)
        self._later = later

    def __call__(self, candidates, *, rounds, **options) -> Race:
        race = super().__call__(candidates, rounds=rounds, **options)
        fast = self._later if rounds == RUN_OFF_ROUNDS else 96.0
        for text, times in race.times_us.items():
            shift = 2 * (text == tuner.AGAIN)
            if text in ("", tuner.AGAIN) or Plan.loads(text) == PLAIN:
                times[:] = [120.0 if (n + shift) % 3 == 0 else 100.0 for n in range(rounds)]
            else:
                times[:] = [fast + 9 * (n % 5 in (0, 2)) for n in range(rounds)]
        return race


def raced(clock: FakeRace) -> tuple[Entry, list[tuple[int, int]]]:
    """With the numbers of plans and rounds of each race of several rounds."""
    tuner.race = clock
    problem = some_problem("ag_gemm")
    entry = measured(problem, defaults(problem, "sequential", "fused", "pipelined"))
    turns = zip(clock.turns, clock.rounds, strict=True)
    return entry, [(len(names), rounds) for names, rounds in turns if rounds > 1]


RACE, RUN_OFF = (4, tuner.ROUNDS), (3, RUN_OFF_ROUNDS)


@pytest.mark.parametrize(("later", "winner"), [(96.0, "fused"), (110.0, "sequential")])
@on_device_ranks(2)
def test_two_plans_that_noise_cannot_tell_apart_run_off(rank, later, winner):
    entry, races = raced(NoisyClock(later))
    assert races == [RACE, RUN_OFF]
    assert (entry.plan.strategy, entry.rounds) == (winner, tuner.ROUNDS)
    assert {one.plan.strategy for one in entry.measured} == {"sequential", "fused", "pipelined"}


@pytest.mark.parametrize(
    ("noisy_rank", "races", "winner"), [(0, [RACE, RUN_OFF], "fused"), (1, [RACE], "sequential")]
)
@on_device_ranks(2, limit_s=20)
def test_the_leader_says_whether_there_is_a_run_off_and_who_wins(rank, noisy_rank, races, winner):
    """On one rank alone the fastest plan and the winner differ."""
    calm = FakeRace(lambda name: 100.0 if name == "sequential" else 200.0)
    entry, turns = raced(NoisyClock(96.0) if rank == noisy_rank else calm)
    assert turns == races
    assert entry.plan.strategy == winner
