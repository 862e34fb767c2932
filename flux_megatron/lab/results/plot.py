"""One picture of a report: step times, losses, and how far the losses lie apart.

A later arm's loss is a thinner line on the earlier ones, so that equal curves are all seen.
"""

from __future__ import annotations

from pathlib import Path

from flux_megatron.lab.results.report import Report
from flux_megatron.lab.results.summary import loss_differences
from flux_megatron.launch.workload import Arm

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
