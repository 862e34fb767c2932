"""Intervals hold what they promise, also where successive step times are correlated."""

from __future__ import annotations

import math
from statistics import fmean, median

import pytest
from written_runs import correlated

from flux_megatron.lab.results import statistics
from flux_megatron.lab.results.statistics import Speedup, speedup, speedup_of_runs, step_time

REPEATS = 400
ITERATIONS, CORRELATIONS = (40, 100, 300), (0.0, 0.5, 0.8)
# 5 % is promised; beyond 7 % for one of nine settings of 400 repeats is 2 standard errors of chance
MOST_WRONG, MOST_WRONG_OF_ONE = 0.07, 0.09


def wrong_share(interval, n: int, rho: float) -> float:
    """How often `interval` of two runs without any difference leaves 1 out."""
    wrong = 0
    for i in range(REPEATS):
        found = interval(correlated(2 * i, n, rho), correlated(2 * i + 1, n, rho))
        wrong += found is not None and not found[0] <= 1 <= found[1]
    return wrong / REPEATS


def test_intervals_without_an_effect_hold_one():
    shares = [
        wrong_share(lambda a, b: speedup(a, b).interval, n, rho)
        for n in ITERATIONS
        for rho in CORRELATIONS
    ]
    assert fmean(shares) <= MOST_WRONG, shares
    assert max(shares) <= MOST_WRONG_OF_ONE, shares


def test_what_is_slower_than_the_run_is_not_taken_for_an_effect():
    """Half of the noise wanders: no interval of one run sees that, what blocks differ by does."""

    def wandering(seed: int) -> list[float]:
        slow, white = correlated(seed, 100, 0.95), correlated(seed + 10_000, 100, 0.0, 1.0)
        return [a * b for a, b in zip(slow, white, strict=True)]

    found = [speedup(wandering(2 * i), wandering(2 * i + 1)) for i in range(REPEATS)]
    assert sum(one.significant for one in found) <= 0.05 * REPEATS


def test_an_effect_above_the_noise_is_found():
    found = [
        speedup(correlated(i, 100, 0.5, 0.22), correlated(i + 1000, 100, 0.5, 0.2))
        for i in range(100)
    ]
    assert sum(one.verdict == "faster" for one in found) >= 95
    assert sum(one.interval[0] <= 1.1 <= one.interval[1] for one in found) >= 90
    slower = speedup(correlated(0, 100, 0.5, 0.2), correlated(1, 100, 0.5, 0.22))
    assert slower.verdict == "slower"
    assert slower.significant


def test_an_effect_below_the_noise_is_not_significant():
    """The interval alone would say faster, but each arm differs from itself by as much."""
    found = Speedup(1.02, (1.005, 1.035), runs=1, noise=0.03)
    assert found.verdict == "not significant: an arm differs from itself by 3.0%"
    assert not found.significant
    assert Speedup(1.02, (1.005, 1.035), runs=1, noise=0.01).significant
    assert Speedup(1.02, (0.99, 1.05), runs=1, noise=0.01).verdict == "not significant"


def test_a_run_that_grows_slower_tells_little():
    """A trend is correlated as far as the run is long: no interval from so few blocks."""
    drifting = [0.2 * (1 + 0.001 * i) for i in range(100)]
    found = speedup(drifting, correlated(0, 100, 0.0))
    assert found.interval is None
    assert found.verdict == "too few iterations for an interval"
    assert not found.significant


def test_step_time_of_few_iterations_is_a_median_alone():
    assert step_time([0.3, 0.1, 0.2]) == statistics.StepTime(0.2, 0, None, None)
    assert step_time([0.3, 0.1, 0.2]).interval is None


def test_one_slow_step_does_not_move_a_step_time():
    times = correlated(3, 100, 0.3)
    slow = [*times[:50], 60.0, *times[51:]]
    assert step_time(slow).median == pytest.approx(step_time(times).median, rel=0.002)
    assert step_time(slow).error == pytest.approx(step_time(times).error, rel=0.3)


def test_equal_times_are_no_effect():
    assert speedup([0.2] * 50, [0.2] * 50).interval == (1, 1)
    assert not speedup([0.2] * 50, [0.2] * 50).significant


APART = 0.01  # of the logarithms of block medians, one after another


def four_blocks(apart: float) -> list[float]:
    """Twenty times whose blocks of five have the medians 1, e^apart, e^2apart and e^3apart."""
    return [math.exp(i * apart) * x for i in range(4) for x in (0.5, 2.0, 1.0, 2.0, 0.5)]


def test_the_interval_of_a_step_time_by_hand():
    """Deviations of 3, 1, 1 and 3 halves: a variance of 5 / 3 over four blocks, t of 3 degrees."""
    found = step_time(four_blocks(APART))
    assert (found.median, found.blocks) == (median(four_blocks(APART)), 4)
    half = 3.182446305284263 * APART * math.sqrt(5 / 3 / 4)
    assert found.interval == pytest.approx(
        (found.median * math.exp(-half), found.median * math.exp(half)), rel=1e-12
    )


@pytest.mark.parametrize(("baseline", "ours"), [(1, 2), (2, 1)])
def test_the_interval_of_a_speedup_by_hand(baseline, ours):
    """Errors 1 to 2, three degrees of freedom each: Welch's 25 / (1 / 3 + 16 / 3) are 75 / 17."""
    found = speedup(four_blocks(baseline * APART), four_blocks(ours * APART))
    half = 2.677173578465619 * APART * math.sqrt(5 / 3 / 4 * (1 + 4))
    assert found.interval == pytest.approx(
        (found.ratio * math.exp(-half), found.ratio * math.exp(half)), rel=1e-12
    )


def test_the_interval_of_three_runs_by_hand():
    """Logarithms 1 apart deviate by 1; t of 2 degrees."""
    found = speedup_of_runs([math.exp(0.05 + i * APART) for i in (-1, 0, 1)])
    half = 4.302652729911275 * APART / math.sqrt(3)
    assert found.interval == pytest.approx((math.exp(0.05 - half), math.exp(0.05 + half)))
    assert (found.runs, found.significant) == (3, True)
    assert not speedup_of_runs([1.02, 1.08]).significant  # two runs are very few


def test_correlation_time_of_a_short_series_by_hand():
    """5 of 19 neighbours differ: (14 - 5) / 20 = 0.45, and 2.35 / 20 that n = 20 hides."""
    times = [2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0] * 2 + [2.0, 2.0, 4.0, 4.0]
    assert sum(times) / 20 == 3
    assert statistics.correlation_time(times) == pytest.approx(1.5675 / 0.4325)
