"""Pictures of losses over steps: of one run, and of ours over stock's with their differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "flux"
UNITS = "nats per byte"
COLOURS = {OURS: "#c0392b", "stock": "#2980b9"}
OTHERS = ("#27ae60", "#8e44ad", "#e67e22")

Rows = list[dict[str, Any]]


def draw(file: Path, rows: Rows, title: str) -> None:
    """Write a PNG of one run's losses."""
    figure, (losses,) = _figure(title, 1)
    _line(losses, rows, "loss", color=COLOURS[OURS], linewidth=1.2)
    losses.set(xlabel="step", ylabel=f"loss ({UNITS})")
    _save(figure, file)


def draw_compared(
    file: Path, curves: dict[str, Rows], tolerance: float, of: str, title: str
) -> None:
    """Write a PNG: ours as a thin line on the wide pale ones of the stock runs, so that equal
    curves are both seen; below, how far each stock run is from ours, beside the `tolerance` in
    nats, `of` any step or of the mean.
    """
    figure, (losses, differences) = _figure(title, 2)
    stock = {name: rows for name, rows in curves.items() if name != OURS}
    others = iter(OTHERS)
    for name, rows in stock.items():
        colour = COLOURS.get(name) or next(others)
        _line(losses, rows, name, color=colour, linewidth=6, alpha=0.35)
        apart = [
            {"step": mine["step"], "loss": abs(mine["loss"] - theirs["loss"])}
            for mine, theirs in zip(curves[OURS], rows, strict=True)
        ]
        _line(differences, apart, f"|{OURS} - {name}|", color=colour, linewidth=1.2)
    _line(losses, curves[OURS], OURS, color="black", linewidth=1)
    differences.axhline(
        tolerance, color="black", linestyle="--", linewidth=0.8, label=f"tolerance of {of}"
    )
    linear_to = tolerance or 1e-6
    differences.set_yscale("symlog", linthresh=linear_to)
    differences.set_ylim(bottom=-0.1 * linear_to)  # so that a line at 0 is seen
    losses.set(ylabel=f"loss ({UNITS})")
    differences.set(xlabel="step", ylabel=f"difference ({UNITS})")
    for axes in (losses, differences):
        axes.legend(fontsize=8)
    _save(figure, file)


def _figure(title: str, panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * panels + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure, [*figure.subplots(panels, 1, sharex=True, squeeze=False).flat]


def _line(axes: Axes, rows: Rows, name: str, **style: Any) -> None:
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, label=name, marker="." if len(rows) == 1 else None, **style)


def _save(figure: Figure, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.ticker import MaxNLocator

    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    FigureCanvasAgg(figure).print_png(str(file))
