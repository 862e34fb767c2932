"""`--flux-compare N`: N stock and N fused iterations in turn, and what the fused ones gain.

Both arms see the same clocks, data and network load, which two runs do not. Every rank counts
iterations, so all switch arms at the same one without communication.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from flux_megatron.integration import arm
from flux_megatron.integration.replaced import around

WARM_UP = 1  # iterations of a block: caches, the allocator, plans of new shapes
FEWEST_PAIRS = 5  # for an interval; with fewer it covers less than COVERAGE
RESAMPLES = 4000
COVERAGE = 0.95

Pair = tuple[Sequence[float], Sequence[float]]  # seconds of iterations: stock, fused

# Those that take turns, block by block: stock, ours, and what a measurement adds.
ARMS: tuple[Callable[[], AbstractContextManager], ...] = (
    partial(arm.use, stock=True), partial(arm.use, stock=False),
)  # fmt: skip


@dataclass(frozen=True)
class Speedup:
    """Stock time by fused time, and its 95 % interval, None where there are too few pairs."""

    ratio: float
    interval: tuple[float, float] | None
    pairs: int
    iterations: int  # that were timed, of each arm

    @property
    def significant(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.ratio:.3f}x, {self.pairs} of the {FEWEST_PAIRS} pairs for an interval"
        low, high = self.interval
        doubt = "" if self.significant else ", not significant"
        return (
            f"{self.ratio:.3f}x (95 %: {low:.3f} to {high:.3f}){doubt}, "
            f"{self.iterations} iterations of each arm"
        )


def speedup(pairs: Sequence[Pair]) -> Speedup:
    """The geometric mean over pairs of blocks of the ratio of their medians.

    The interval is the bootstrap-t's over pairs: unlike plain percentiles it has its coverage
    for the five or ten pairs of a short run too. The same times give the same interval.
    """
    logs = torch.tensor(
        [math.log(median(stock) / median(fused)) for stock, fused in pairs], dtype=torch.float64
    )
    n, mean = len(pairs), float(logs.mean())
    iterations = sum(len(fused) for _, fused in pairs)
    interval = None
    if n >= FEWEST_PAIRS:
        picks = logs[torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(0))]
        t = (picks.mean(1) - mean) / picks.std(1)
        tails = torch.tensor([(1 + COVERAGE) / 2, (1 - COVERAGE) / 2], dtype=torch.float64)
        low, high = (mean - torch.quantile(t, tails) * logs.std()).tolist()
        interval = (math.exp(low), math.exp(high))
    return Speedup(math.exp(mean), interval, n, iterations)


class Comparison:
    """Calls an iteration in its arm, and keeps its time if the block is warm."""

    def __init__(self, block: int) -> None:
        self.block, self.arms = block, ARMS
        self.count = 0
        self._blocks: list[list[float]] = []  # of the arms in turn

    def run(self, iteration: Callable[[], Any]) -> Any:
        """What `iteration` returns. The GPU is idle before and after, in both arms alike."""
        index, position = divmod(self.count, self.block)
        self.count += 1
        with self.arms[index % len(self.arms)]():
            _wait_for_gpu()
            start = time.perf_counter()
            result = iteration()
            _wait_for_gpu()
        if position == 0:
            self._blocks.append([])
        if position >= WARM_UP:
            self._blocks[-1].append(time.perf_counter() - start)
        return result

    def result(self) -> Speedup | None:
        """Of all turns that are complete; None before the first is."""
        turn = len(self.arms)
        done = self.count // (turn * self.block)
        blocks = self._blocks[: turn * done]
        return speedup(list(zip(blocks[::turn], blocks[1::turn], strict=True))) if done else None


def alternate(training: Any, block: int) -> Comparison:
    """Let `train_step` of the module megatron.training.training run in both arms in turn."""
    comparison = Comparison(block)

    @around(training, "train_step")
    def in_its_arm(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return comparison.run(lambda: original(*given, **named))

    return comparison


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
