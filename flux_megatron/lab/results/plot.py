"""One picture of a report: step times, losses, and how far the losses lie apart.

A later arm's loss is a thinner line on the earlier ones, so that equal curves are all seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flux_megatron.lab.results.iterations import Series
from flux_megatron.lab.results.report import Report
from flux_megatron.lab.results.summary import loss_differences, warm_times
from flux_megatron.launch.workload import Arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"megatron": "#555555", "te": "#2a78d6", "flux": "#d6452a"}
WIDTHS: dict[Arm, float] = {"megatron": 6.0, "te": 3.5, "flux": 1.0}  # of the lines of losses
ALPHAS = {"megatron": 0.35, "te": 0.5, "flux": 1.0}


def draw(report: Report, file: Path) -> None:
    """A PNG; warm-up is pale, a restart a dotted line, and all runs of an arm have its colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 10), layout="constrained")
    figure.suptitle(f"{report.experiment.name}: {report.machine}")
    times, losses, differences = figure.subplots(3, 1, sharex=True)
    for run in report.runs:
        for arm in (arm for arm in WIDTHS if arm in run.arms):
            series = run.arms[arm]
            _step_times(times, series, _warmup(report, arm), arm)
            logged = [(i.number, i.loss) for i in series.iterations if i.loss is not None]
            _line(losses, logged, arm, arm, linewidth=WIDTHS[arm], alpha=ALPHAS[arm])
            if arm != "megatron" and "megatron" in run.arms:
                apart = loss_differences(series, run.arms["megatron"])
                _line(differences, [*apart.items()], arm, f"|{arm} - megatron|", linewidth=1.2)
    times.set(ylabel="step time (ms)", ylim=(0, _slowest_ms(report)))
    losses.set(ylabel="loss (nats)")
    differences.set(ylabel="loss difference (nats)", xlabel="iteration")
    differences.set_yscale("symlog", linthresh=1e-6)
    differences.set_ylim(bottom=-1e-7)  # so that a line at 0 is seen
    differences.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (times, losses, differences):
        axes.grid(alpha=0.3)
        handles, names = axes.get_legend_handles_labels()
        once = dict(zip(names, handles, strict=True))
        if once:
            axes.legend(once.values(), once.keys())
    FigureCanvasAgg(figure).print_png(str(file))


def _step_times(axes: Axes, series: Series, warmup: int, arm: str) -> None:
    warm = set(series.warm(warmup))
    for shown, alpha, name in ((series.iterations, 0.2, None), (warm, 0.9, arm)):
        numbers, times = [i.number for i in shown], [i.seconds * 1e3 for i in shown]
        axes.plot(numbers, times, ".", color=COLOURS[arm], alpha=alpha, label=name)
    for restart in series.restarts:
        axes.axvline(restart, color=COLOURS[arm], linestyle=":", linewidth=1)


def _line(axes: Axes, points: list[tuple[int, float]], arm: str, name: str, **style: Any) -> None:
    numbers, values = [x for x, _ in points], [y for _, y in points]
    axes.plot(numbers, values, color=COLOURS[arm], label=name, **style)


def _slowest_ms(report: Report) -> float | None:
    """A first iteration that takes a minute must not flatten all others."""
    warm = [
        time
        for run in report.runs
        for arm, series in run.arms.items()
        for time in warm_times(series, _warmup(report, arm))
    ]
    return 1.1e3 * max(warm) if warm else None


def _warmup(report: Report, arm: Arm) -> int:
    return report.experiment.arms[arm].training.warmup_steps
