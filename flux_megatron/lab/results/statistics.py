"""How sure a step time and a speedup are.

Step times of one run are correlated: clocks, temperature, neighbours change slower than steps. So
an interval rests on blocks of successive iterations, few and each long enough (twice the
correlation time) for its median to be nearly independent of the next one's. The spread of four to
six block medians gives the standard error, Student's t the interval. Several runs of all arms are
better than one: between them lies what no single run shows (nodes, clocks), and their ratios are
taken as they are, one a run. All is done in logarithms, where a ratio is a difference.

Resampling such blocks instead (a percentile bootstrap) misses the true ratio in 5 to 20 % of runs
of 100 iterations, and in up to 40 % of runs of 40, at correlations up to 0.8: too few to resample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles, stdev

from scipy.special import stdtrit

COVERAGE = 0.95
FEWEST_BLOCKS, MOST_BLOCKS = 4, 6
SHORTEST_BLOCK = 5  # so that its median bears a slow step
CORRELATION_TIMES = 2  # of a block
Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """The median of correlated times; `error` is its logarithm's standard error.

    `error` and `interval` are None where there are too few iterations for FEWEST_BLOCKS blocks.
    `noise` is how much slower the slowest block was than the fastest, 0.02 for 2 %.
    """

    median: float
    blocks: int
    error: float | None
    noise: float | None

    @property
    def interval(self) -> Interval | None:
        return None if self.error is None else _around(self.median, self.error, self.blocks - 1)


@dataclass(frozen=True)
class Speedup:
    """How many times faster; `interval` is None with too few iterations.

    `runs` is 1 where the interval rests on blocks of one run. Then `noise` is the larger one of
    both arms, and a smaller speedup is not significant.
    """

    ratio: float
    interval: Interval | None
    runs: int
    noise: float | None = None

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return "too few iterations for an interval"
        if self.interval[0] <= 1 <= self.interval[1]:
            return "not significant"
        if self.noise is not None and abs(math.log(self.ratio)) <= math.log1p(self.noise):
            return f"not significant: an arm differs from itself by {self.noise:.1%}"
        return "faster" if self.ratio > 1 else "slower"

    @property
    def significant(self) -> bool:
        return self.verdict in ("faster", "slower")


def step_time(times: Sequence[float]) -> StepTime:
    """`times` of successive iterations, at least one."""
    length = max(SHORTEST_BLOCK, math.ceil(CORRELATION_TIMES * correlation_time(times)))
    count = min(len(times) // length, MOST_BLOCKS)
    if count < FEWEST_BLOCKS:
        return StepTime(median(times), count, None, None)
    edges = [round(i * len(times) / count) for i in range(count + 1)]
    logs = [math.log(median(times[a:b])) for a, b in pairwise(edges)]
    error = stdev(logs) / math.sqrt(count)
    return StepTime(median(times), count, error, math.expm1(max(logs) - min(logs)))


def speedup(baseline: Sequence[float], ours: Sequence[float]) -> Speedup:
    """Of two independent runs of successive iterations: Welch's interval over their blocks."""
    a, b = step_time(baseline), step_time(ours)
    ratio = a.median / b.median
    if a.error is None or b.error is None or a.noise is None or b.noise is None:
        return Speedup(ratio, None, 1)
    terms = a.error**4 / (a.blocks - 1) + b.error**4 / (b.blocks - 1)
    error = math.hypot(a.error, b.error)
    interval = _around(ratio, error, error**4 / terms if terms else 1)
    return Speedup(ratio, interval, 1, max(a.noise, b.noise))


def speedup_of_runs(ratios: Sequence[float]) -> Speedup:
    """Of the ratios of several independent runs that had both arms: their geometric mean."""
    logs, runs = [math.log(ratio) for ratio in ratios], len(ratios)
    mean = math.exp(fmean(logs))
    return Speedup(mean, _around(mean, stdev(logs) / math.sqrt(runs), runs - 1), runs)


def _around(value: float, error: float, freedom: float) -> Interval:
    """Student's, where `error` is of the value's logarithm."""
    half = float(stdtrit(freedom, 0.5 + COVERAGE / 2)) * error
    return value * math.exp(-half), value * math.exp(half)


def correlation_time(times: Sequence[float]) -> float:
    """Iterations until the next independent one, as for a first-order autoregressive process.

    Its correlation is estimated from successive times, single slow steps clipped, and raised by
    what a short series hides of it (Kendall: (1 + 3 rho) / n).
    """
    n = len(times)
    if n < FEWEST_BLOCKS * SHORTEST_BLOCK:
        return 1.0
    low, *_, high = quantiles(times, n=20)
    clipped = [min(max(time, low), high) for time in times]
    mean = fmean(clipped)
    distances = [time - mean for time in clipped]
    square = sum(d * d for d in distances)
    if square == 0:
        return 1.0
    rho = sum(d * e for d, e in pairwise(distances)) / square
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.99)
    return (1 + rho) / (1 - rho)
