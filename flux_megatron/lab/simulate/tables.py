"""Predictions as tables of the terminal, and as plain values for JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flux_megatron.lab.perf import accuracy
from flux_megatron.lab.simulate.predictions import Alternative, Predictions

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
A_NANOSECOND = 1e-3  # less is what rounding leaves
ONE_AT_A_TIME = "\nOther values of what is assumed, one at a time"


def tables(found: Predictions) -> Iterator[str | Table]:
    yield title(found)
    yield accuracy.sentence(next(iter(found.experiment.arms.values())))
    yield parts(found.steps)
    yield _arms(found)
    if found.alternatives:
        yield ONE_AT_A_TIME
        table = others(
            found.baseline, found.steps, found.alternatives, "speedup",
            lambda arm, of: f"{found.speedups(arm, of):.3f}",
        )  # fmt: skip
        table.add_section()
        compared = (arm for arm in found.steps if arm != found.baseline)
        ranges = ("{:.3f} to {:.3f}".format(*found.range(arm)) for arm in compared)
        table.add_row("all of them", "", *ranges)
        yield table


def parts(steps: Mapping[Any, Any]) -> Table:
    """Two columns an arm: what a step consists of, in time and as a share."""
    from rich.table import Table

    unit = _unit(steps.values())
    table = Table("part of a step")
    for arm in steps:
        table.add_column(f"{arm}, {unit}", justify="right")
        table.add_column("%", justify="right")
    for name in dict.fromkeys(name for step in steps.values() for name in step.parts):
        of_arms = [(step, step.parts.get(name, 0.0)) for step in steps.values()]
        if any(us > A_NANOSECOND for _, us in of_arms):
            cells = ((_time(us, unit), f"{us / step.step_us * 100:.1f}") for step, us in of_arms)
            table.add_row(name, *(cell for pair in cells for cell in pair))
    return table


def _arms(found: Predictions) -> Table:
    from rich.table import Table

    unit = _unit(found.steps.values())
    over = [arm for arm in found.steps if arm in (found.baseline, "te") and len(found.steps) > 1]
    paper = {arm: found.paper_speedup(arm) for arm in over}
    table = Table("arm", f"step, {unit}", "tokens/s", "MFU, %", "memory, GiB")
    for arm in over:
        table.add_column(f"over {arm}")
        if paper[arm]:
            table.add_column("the paper's")
    for column in table.columns[1:]:
        column.justify = "right"
    for arm, step in found.steps.items():
        cells = [_time(step.step_us, unit), f"{step.tokens_per_second:,.0f}"]
        cells += [f"{step.mfu * 100:.1f}" if step.mfu else "?", f"{step.memory_bytes / GIB:.1f}"]
        for other in over:
            cells.append(f"{found.steps[other].step_us / step.step_us:.3f}")
            if paper[other]:
                cells.append(paper[other] if arm == "flux" else "")
        table.add_row(arm, *cells)
    return table


def others(
    baseline: str, steps: Mapping[Any, Any], alternatives: Iterable[Alternative], what: str,
    figure: Callable[[Any, Mapping[Any, Any]], str],
) -> Table:  # fmt: skip
    """A row for other values: the step of the baseline, and the `figure` of every other arm."""
    from rich.table import Table

    compared, unit = [arm for arm in steps if arm != baseline], _unit(steps.values())
    table = Table("", f"{baseline}: step, {unit}", *(f"{arm}: {what}" for arm in compared))
    for one in alternatives:
        label = ", ".join(f"{key} = {value}" for key, value in one.values.items())
        if one.steps:
            step = _time(one.steps[baseline].step_us, unit)
            table.add_row(label, step, *(figure(arm, one.steps) for arm in compared))
        else:
            table.add_row(label, f"refused: {one.refused}")
    return table


def remarks(found: Predictions, assumptions: bool) -> Iterator[str]:
    """What the figures rest on; all `assumptions`, or how many."""
    experiment = found.experiment
    if "section" in experiment.paper and found.is_published:
        yield f"The paper's figures: {experiment.paper['section']}."
    assumed, keys = experiment.assumed, defaultdict[str, list[str]](list)
    if assumed and not assumptions:
        yield f"{len(assumed)} values are assumed: --assumptions lists them with their reasons."
    elif assumed:
        yield "Assumed, as nobody states it:"
        for key, why in assumed.items():
            keys[why].append(key)
        yield from (f"  {', '.join(names)}: {why}" for why, names in keys.items())
    yield "How to read it: docs/cluster.md. How far off it is: docs/reference/cost_model.md."


def plain(found: Predictions) -> dict[str, Any]:
    """All of it in the types of JSON; times in microseconds, memory in bytes."""
    experiment = found.experiment
    return {
        "experiment": experiment.name,
        "paper": experiment.paper if found.is_published else {},
        "error_of_the_model": asdict(accuracy.of(next(iter(found.experiment.arms.values())))),
        "assumed": experiment.assumed,
        "arms": {arm: asdict(step) for arm, step in found.steps.items()},
        "speedups": {arm: found.speedups(arm) for arm in found.steps},
        "alternatives": [
            {"key": key, "value": value, **figures(alternative)}
            for alternative in found.alternatives
            for key, value in alternative.values.items()
        ],
    }


def figures(alternative: Alternative) -> dict[str, Any]:
    steps = {arm: step.step_us for arm, step in alternative.steps.items()}
    return {"refused": alternative.refused, "step_us": steps}


def title(found: Predictions) -> str:
    """The experiment, its GPUs and how they are split."""
    workload = next(iter(found.experiment.arms.values()))
    parallel = workload.parallel
    return (
        f"{found.experiment.name}: {parallel.world_size} x {workload.cluster.gpu}, "
        f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}, M {workload.tokens}, "
        f"{workload.micro_batches} micro-batches"
    )


def _unit(steps: Iterable[Any]) -> str:
    """One for all times of a table."""
    return "s" if max((step.step_us for step in steps), default=0.0) >= 1e7 else "ms"


def _time(us: float, unit: str) -> str:
    return f"{us / 1e6:.3f}" if unit == "s" else f"{us / 1e3:.1f}"
