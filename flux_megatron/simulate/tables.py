"""Predictions as tables of the terminal, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flux_megatron.perf.step import Step
from flux_megatron.perf.sweep import Point, costly_from
from flux_megatron.simulate.predictions import Predictions

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
A_NANOSECOND = 1e-3  # less is what rounding leaves
COSTLY = 0.1  # of a step
KINDS = {"tensor": ("tp",), "pipeline": ("pp", "bubble"), "data": ("dp",)}


def tables(found: Predictions) -> Iterator[str | Table]:
    """Each table after its heading."""
    yield title(found)
    yield _arms(found)
    if found.alternatives:
        yield "\nOther values of what is assumed, one at a time"
        yield _alternatives(found)
    for arm, points in found.points.items():
        yield f"\n{arm}: the best split of so many GPUs, and the exposed shares of its step"
        yield _points(points)


def _arms(found: Predictions) -> Table:
    """A column an arm: what a step takes, of what, and what that makes."""
    from rich.table import Table

    table = Table("", *found.steps)
    for column in table.columns[1:]:
        column.justify = "right"
    steps = found.steps.values()
    table.add_row("step", *(_time(step.step_us) for step in steps), end_section=True)
    for name in dict.fromkeys(name for step in steps for name in step.parts):
        if any(step.parts.get(name, 0.0) > A_NANOSECOND for step in steps):
            table.add_row(f"  {name}", *(_part(step, name) for step in steps))
    table.add_section()
    table.add_row("tokens/s", *(f"{step.tokens_per_second:,.0f}" for step in steps))
    table.add_row("MFU", *(f"{step.mfu:.1%}" if step.mfu else "?" for step in steps))
    table.add_row("memory, GiB", *(f"{step.memory.total / GIB:.1f}" for step in steps))
    table.add_section()
    for over in found.steps:
        if over in (found.baseline, "te") and len(found.steps) > 1:
            ratios = (f"{found.steps[over].step_us / step.step_us:.3f}x" for step in steps)
            table.add_row(f"speedup over {over}", *ratios)
            paper = found.experiment.paper.get(f"speedup_over_{over}")
            if paper is not None and "flux" in found.steps:
                cells = (f"{paper}x" if arm == "flux" else "" for arm in found.steps)
                table.add_row("  the paper's", *cells)
    return table


def _alternatives(found: Predictions) -> Table:
    """A row for each other value: the step of the baseline, and what the other arms make of it."""
    from rich.table import Table

    others = [arm for arm in found.steps if arm != found.baseline]
    headers = (f"{arm}: speedup" for arm in others)
    table = Table("", f"{found.baseline}: step", *headers)
    for alternative in found.alternatives:
        label = f"{alternative.key} = {alternative.value}"
        if alternative.steps:
            step = _time(alternative.steps[found.baseline].step_us)
            ratios = (f"{found.speedups(arm, alternative.steps):.3f}x" for arm in others)
            table.add_row(label, step, *ratios)
        else:
            table.add_row(label, f"refused: {alternative.refused}")
    table.add_section()
    ranges = ("{:.3f} to {:.3f}x".format(*found.range(arm)) for arm in others)
    table.add_row("all of them", "", *ranges)
    return table


def _points(points: list[Point]) -> Table:
    """A row for each number of GPUs; `gain` is the speedup over half as many, of 2 at best."""
    from rich.table import Table

    headers = ("step", "gain", "tp", "bubble", "pp", "dp", "MFU", "GiB")
    table = Table("GPUs", "tp x pp x dp", *headers)
    before: dict[int, Step] = {}
    for point in points:
        step = point.step
        if step is None or point.workload is None:
            table.add_row(str(point.gpus), point.reason)
            continue
        parallel = point.workload.parallel
        chunks = f" ({parallel.virtual_stages} chunks)" if parallel.virtual_stages > 1 else ""
        half = before.get(point.gpus // 2)
        gain = f"{half.step_us / step.step_us:.2f}x" if half else ""
        table.add_row(
            str(point.gpus),
            f"{parallel.tp} x {parallel.pp} x {parallel.dp}{chunks}",
            _time(step.step_us),
            gain,
            *(f"{step.exposed[kind] / step.step_us:.1%}" for kind in ("tp", "bubble", "pp", "dp")),
            f"{step.mfu:.1%}" if step.mfu else "?",
            f"{step.memory.total / GIB:.0f}",
        )
        before[point.gpus] = step
    return table


def remarks(found: Predictions) -> Iterator[str]:
    """What the figures rest on."""
    experiment = found.experiment
    for arm, points in found.points.items():
        costly = ((name, costly_from(points, kinds, COSTLY)) for name, kinds in KINDS.items())
        spans = [
            f"{name} from {gpus} GPUs on" if gpus else f"{name} never" for name, gpus in costly
        ]
        yield f"{arm}: parallelism that costs more than {COSTLY:.0%} of a step: {', '.join(spans)}."
    if "section" in experiment.paper:
        yield f"The paper's figures: {experiment.paper['section']}."
    if experiment.assumed:
        yield "Assumed, as nobody states it:"
    for keys, why in _by_reason(experiment.assumed).items():
        yield f"  {keys}: {why}"
    yield "The model, and what it leaves out: docs/simulator.md."


def _by_reason(assumed: dict[str, str]) -> dict[str, str]:
    keys: dict[str, list[str]] = {}
    for key, why in assumed.items():
        keys.setdefault(why, []).append(key)
    return {", ".join(names): why for why, names in keys.items()}


def plain(found: Predictions) -> dict[str, Any]:
    """All of it in the types of JSON; times in microseconds, memory in bytes."""
    experiment = found.experiment
    return {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "assumed": experiment.assumed,
        "arms": {arm: _plain_step(step) for arm, step in found.steps.items()},
        "speedups": {arm: found.speedups(arm) for arm in found.steps},
        "alternatives": [
            {
                "key": alternative.key,
                "value": alternative.value,
                "refused": alternative.refused,
                "step_us": {arm: step.step_us for arm, step in alternative.steps.items()},
            }
            for alternative in found.alternatives
        ],
        "gpus": {
            arm: [
                {
                    "gpus": point.gpus,
                    "reason": point.reason,
                    "parallel": asdict(point.workload.parallel) if point.workload else None,
                    "step": _plain_step(point.step) if point.step else None,
                }
                for point in points
            ]
            for arm, points in found.points.items()
        },
    }


def _plain_step(step: Step) -> dict[str, Any]:
    values = asdict(step)
    values["memory"]["total"] = step.memory.total
    return values


def title(found: Predictions) -> str:
    """The experiment, its GPUs and how they are split."""
    workload = next(iter(found.workloads.values()))
    parallel = workload.parallel
    return (
        f"{found.experiment.name}: {parallel.world_size} x {workload.cluster.gpu}, "
        f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}, M {workload.tokens}, "
        f"{workload.micro_batches} micro-batches"
    )


def _part(step: Step, name: str) -> str:
    us = step.parts.get(name, 0.0)
    return f"{_time(us)} {us / step.step_us:6.1%}"


def _time(us: float) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1e7 else f"{us / 1e3:.1f} ms"
