"""Which plan has won: ties, noise, and run-offs of what noise cannot tell apart."""

from __future__ import annotations

import random

import pytest
from races import FakeRace, defaults, measured, some_problem
from ranks import on_device_ranks

from flux_megatron.problem import Plan
from flux_megatron.tuning import tuner
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.timing import Race

RUN_OFF_ROUNDS = tuner.RUN_OFF * tuner.ROUNDS

PLAIN, FUSED, PIPELINED = Plan("sequential"), Plan("fused"), Plan("pipelined")


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


def test_one_lucky_round_does_not_win():
    assert settled([100] * 5, [100] * 5, [10, 101, 101, 101, 10])[0] == "sequential"


def test_what_is_faster_in_nearly_every_round_wins_in_spite_of_noise():
    """Clocks change from turn to turn by more than the plans differ."""
    plain, again = [100, 120, 110, 90] * 3, [115, 100, 95, 110] * 3
    other = [a - 1 for a in map(min, plain, again)]
    assert settled(plain, again, other) == ("fused", 17.5)
    slower_in = [*other[:8], *([200] * 4)]
    assert settled(plain, again, slower_in)[0] == "sequential", "8 of 12 rounds may be chance"
    assert settled(plain[:4], again[:4], other[:4])[0] == "sequential", "4 rounds are too few"


def test_plans_that_are_as_fast_rarely_win():
    draw = random.Random(0)

    def turns() -> list[float]:
        return [draw.gauss(100, 5) for _ in range(tuner.ROUNDS)]

    won = sum(settled(turns(), turns(), turns())[0] == "fused" for _ in range(2000))
    assert won / 2000 < 3 * tuner.CHANCE  # by either rule


def test_plans_that_are_as_fast_rarely_win_a_run_off():
    """Nearly every race ends in one then: the luckiest of three runs off with `sequential`."""
    draw = random.Random(0)

    def race_of(plans: list[Plan], rounds: int) -> dict[str, list[float]]:
        names = [*(plan.dumps() for plan in plans), tuner.AGAIN]
        return {name: [draw.gauss(100, 5) for _ in range(rounds)] for name in names}

    run_off, won = 0, 0
    for _ in range(2000):
        times = race_of([PLAIN, FUSED, PIPELINED, Plan("hopper")], tuner.ROUNDS)
        fastest = tuner._fastest(times)
        if fastest != tuner.settle(times, PLAIN)[0]:
            run_off += 1
            won += tuner.settle(race_of([PLAIN, fastest], RUN_OFF_ROUNDS), PLAIN)[0] == fastest
    assert run_off > 1000
    assert won / run_off < 2 * tuner.CHANCE


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
