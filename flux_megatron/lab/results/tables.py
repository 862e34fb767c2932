"""A report as tables, for the terminal and as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from flux_megatron.lab.results.report import Report
from flux_megatron.lab.results.statistics import COVERAGE, Speedup
from flux_megatron.lab.results.summary import ArmSummary, Parity, loss_differences
from flux_megatron.launch.workload import Arm

if TYPE_CHECKING:
    from rich.table import Table

SURE = f"{COVERAGE:.0%}"
# What numbers the runs comes first, and only where there are several; > is of numbers.
HEADS = {
    "step time": f"run arm >timed >step_ms {SURE} p20_to_p80 >tokens/s >MFU",
    "speedup": f"run arm_over_baseline >speedup {SURE} verdict paper",
    "loss: absolute differences, nats": "run arms >common >max >mean >first_at bound verdict",
}
Row = Sequence[str]
# of the lines of losses: a later arm's is thinner, so that equal curves are all seen
COLOURS = {"megatron": "#555555", "te": "#2a78d6", "flux": "#d6452a"}
WIDTHS: dict[Arm, float] = {"megatron": 6.0, "te": 3.5, "flux": 1.0}
ALPHAS = {"megatron": 0.35, "te": 0.5, "flux": 1.0}


def tables(report: Report, markdown: bool = False) -> list[Table]:
    """Arms, speedups, losses; those without a row are left out."""
    from rich.box import MARKDOWN, SIMPLE
    from rich.table import Table

    found, first = [], 0 if len(report.runs) > 1 else 1
    for (title, heads), rows in zip(HEADS.items(), _rows(report), strict=True):
        table = Table(title=title, title_justify="left", box=MARKDOWN if markdown else SIMPLE)
        for head in heads.split()[first:]:
            table.add_column(
                head.lstrip(">").replace("_", " "),
                justify="right" if head.startswith(">") else "left",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*row[first:])
        found += [table] if rows else []
    return found


def as_markdown(report: Report) -> str:
    from rich.console import Console

    console = Console(file=StringIO(), width=10_000)
    console.print(f"# {report.experiment.name}\n\n{report.machine}.\n")
    for table in tables(report, markdown=True):
        console.print(f"## {table.title}")
        table.title = None
        console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([*lines, *(f"- {remark}" for remark in remarks(report))]) + "\n"


def remarks(report: Report) -> list[str]:
    """What the tables do not show: arms without iterations, restarts, what was left out."""
    found = []
    for run, arms in zip(report.runs, report.arms, strict=True):
        if missing := [arm for arm in report.experiment.arms if arm not in arms]:
            found.append(f"{run.folder}: no iterations of {', '.join(missing)}")
        for arm, one in arms.items():
            found += [f"{run.folder}/{arm}: {text}" for text in _events(one)]
    if report.on_cpu:
        found.append("on a CPU kernels are interpreted: these times say nothing of a GPU")
    if any(one.paper for one in report.speedups):
        found.append(f"paper: {report.experiment.paper.get('section', 'section not given')}")
    return found


def _rows(report: Report) -> Iterable[list[Row]]:
    yield [
        (str(index + 1), arm, str(one.timed), *_times(one))
        for index, arms in enumerate(report.arms)
        for arm, one in arms.items()
    ]
    yield [
        ("all" if one.run is None else str(one.run + 1), f"{one.arm} over {one.baseline}",
         f"{one.speedup.ratio:.3f}x", _interval(one.speedup), one.speedup.verdict,
         one.paper or "-")
        for one in report.speedups
    ]  # fmt: skip
    yield [
        (str(one.run + 1), f"{one.arm} and {one.baseline}", *_parity(one.parity))
        for one in report.losses
    ]


def _times(one: ArmSummary) -> Row:
    if one.step is None:
        return ["-"] * 5
    return (
        _milliseconds(one.step.median),
        " to ".join(map(_milliseconds, one.step.interval or ())) or "too few",
        " to ".join(map(_milliseconds, one.spread or ())) or "-",
        f"{one.tokens_per_second:,.0f}",
        "-" if one.mfu is None else f"{one.mfu:.1%}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 1 else f"{seconds * 1e3:.1f}"


def _interval(one: Speedup) -> str:
    return " to ".join(f"{bound:.3f}" for bound in one.interval or ()) or "-"


def _parity(one: Parity | None) -> Row:
    if one is None:
        return "0", "-", "-", "-", "-", "no common iteration"
    return (
        str(one.common),
        f"{one.max:.2e}",
        f"{one.mean:.2e}",
        str(one.first_different or "-"),
        f"{one.measure} {one.bound:g}",
        "within" if one.within else "DIFFERENT",
    )


def _events(one: ArmSummary) -> list[str]:
    at = ", ".join(map(str, one.restarts))
    found = {
        f"restarted at iteration {at}": len(one.restarts),
        f"{one.replaced} iterations done again after a restart": one.replaced,
        f"{one.skipped} skipped iterations, {one.nan} of them without a finite loss": one.skipped,
        f"{one.torn} unfinished last lines left out": one.torn,
    }
    return [text for text, count in found.items() if count]


def draw(report: Report, file: Path) -> None:
    """A PNG: step times, losses, and how far these lie apart. Warm-up is pale, a restart a dotted
    line, and all runs of an arm have its colour.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 10), layout="constrained")
    figure.suptitle(f"{report.experiment.name}: {report.machine}")
    times, losses, differences = figure.subplots(3, 1, sharex=True)
    for run, arm in ((run, arm) for run in report.runs for arm in WIDTHS if arm in run.arms):
        series, colour = run.arms[arm], COLOURS[arm]
        warm = series.warm(report.experiment.arms[arm].training.warmup_steps)
        for shown, alpha, label in ((series.iterations, 0.2, None), (warm, 0.9, arm)):
            points = [i.number for i in shown], [i.seconds * 1e3 for i in shown]
            times.plot(*points, ".", color=colour, alpha=alpha, label=label)
        for restart in series.restarts:
            times.axvline(restart, color=colour, linestyle=":", linewidth=1)
        logged = [(i.number, i.loss) for i in series.iterations if i.loss is not None]
        numbers, values = [x for x, _ in logged], [y for _, y in logged]
        style = {"linewidth": WIDTHS[arm], "alpha": ALPHAS[arm]}
        losses.plot(numbers, values, color=colour, label=arm, **style)
        if arm != "megatron" and "megatron" in run.arms:
            apart = loss_differences(series, run.arms["megatron"])
            name = f"|{arm} - megatron|"
            differences.plot([*apart], [*apart.values()], color=colour, label=name, linewidth=1.2)
    # a first iteration that takes a minute must not flatten all others
    slowest = [one for run in report.runs for arm in run.arms for one in run.warm_times(arm)]
    times.set(ylabel="step time (ms)", ylim=(0, 1.1e3 * max(slowest) if slowest else None))
    losses.set(ylabel="loss (nats)")
    differences.set(ylabel="loss difference (nats)", xlabel="iteration")
    differences.set_yscale("symlog", linthresh=1e-6)
    differences.set_ylim(bottom=-1e-7)  # so that a line at 0 is seen
    differences.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (times, losses, differences):
        axes.grid(alpha=0.3)
        handles, names = axes.get_legend_handles_labels()
        if once := dict(zip(names, handles, strict=True)):
            axes.legend(once.values(), once.keys())
    FigureCanvasAgg(figure).print_png(str(file))
