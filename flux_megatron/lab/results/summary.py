"""What one arm of a run reached, and how close two arms' losses are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, quantiles

from flux_megatron.lab.perf import flops
from flux_megatron.lab.results.iterations import Series
from flux_megatron.lab.results.statistics import StepTime, step_time
from flux_megatron.launch.workload import Workload

# Nats. float32: the same sums, a few of them in another order (1e-5, as in `train --compare`), and
# the last digit that Megatron prints of losses above 10. 16 bits: how far stock Megatron's own
# curves lie apart when only the order of its sums differs (docs/results/h200x4/train_compare.json).
BOUNDS = {"float32": ("max", 2e-5), "bfloat16": ("mean", 0.02), "float16": ("mean", 0.02)}


@dataclass(frozen=True)
class ArmSummary:
    """Of the iterations after warm-up; `step` is None where there are none of them yet."""

    timed: int
    step: StepTime | None  # seconds
    spread: tuple[float, float] | None  # seconds: 20 % of the steps are faster, 20 % slower
    tokens_per_second: float | None
    mfu: float | None
    last: int  # iteration
    final_loss: float | None
    restarts: tuple[int, ...]
    replaced: int
    skipped: int
    nan: int
    torn: int


@dataclass(frozen=True)
class Parity:
    """Absolute differences of two arms' losses, in nats, over the iterations that both logged.

    An iteration whose loss is not a number in one of them differs infinitely.
    """

    common: int
    max: float
    mean: float
    first_different: int | None
    measure: str  # which of the two is bounded
    bound: float

    @property
    def within(self) -> bool:
        return (self.max if self.measure == "max" else self.mean) <= self.bound


def summarise(series: Series, workload: Workload) -> ArmSummary:
    times = warm_times(series, workload.training.warmup_steps)
    step = step_time(times) if times else None
    fifths = quantiles(times, n=5, method="inclusive") if len(times) > 1 else None
    losses = [i.loss for i in series.iterations if i.loss is not None]
    tokens = workload.model.seq_length * workload.training.global_batch
    per_second = tokens / step.median if step else None
    mfu = flops.mfu(workload, step.median) if step else None
    last, final = series.iterations[-1].number, losses[-1] if losses else None
    skipped = sum(i.skipped for i in series.iterations)
    nan = sum(i.nan for i in series.iterations)
    spread = (fifths[0], fifths[-1]) if fifths else None
    return ArmSummary(
        len(times), step, spread, per_second, mfu, last, final,
        series.restarts, series.replaced, skipped, nan, series.torn,
    )  # fmt: skip


def warm_times(series: Series, warmup: int) -> list[float]:
    """Seconds of successive iterations, those of the warm-up of every attempt left out.

    So are skipped ones, in which the optimizer does nothing.
    """
    return [i.seconds for i in series.warm(warmup) if not i.skipped]


def parity(ours: Series, baseline: Series, dtype: str, bound: float | None = None) -> Parity | None:
    """None where no iteration is common: means over other iterations are not compared."""
    differences = loss_differences(ours, baseline)
    if not differences:
        return None
    measure, usual = BOUNDS[dtype]
    first = next((n for n, value in differences.items() if value), None)
    largest, mean = max(differences.values()), fmean(differences.values())
    bound = usual if bound is None else bound
    return Parity(len(differences), largest, mean, first, measure, bound)


def loss_differences(ours: Series, baseline: Series) -> dict[int, float]:
    """By iteration. One that either arm skipped has no loss to compare."""
    theirs = {(i.number, i.since): i.loss for i in baseline.iterations}
    found = {}
    for i in ours.iterations:
        other = theirs.get((i.number, i.since))
        if i.loss is not None and other is not None:
            difference = abs(i.loss - other)
            found[i.number] = difference if math.isfinite(difference) else math.inf
    return found
