"""Pictures of losses over steps: of one run, and of ours over stock's with their differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, UNITS = "flux", "nats per byte"
COLOURS = ("#2980b9", "#27ae60", "#8e44ad")

Rows = list[dict[str, Any]]


def draw(file: Path, rows: Rows, title: str) -> None:
    """Write a PNG of one run's losses."""
    figure = _figure(title, 1)
    _line(figure.axes[0], rows, "loss", color="#c0392b", linewidth=1.2)
    _save(figure, file)


def draw_compared(
    file: Path, curves: dict[str, Rows], tolerance: float, of: str, title: str
) -> None:
    """Write a PNG: ours as a thin line on the wide pale ones of the stock runs, so that equal
    curves are both seen; below, how far each stock run is from ours, beside the `tolerance` in
    nats, `of` any step or of the mean.
    """
    figure = _figure(title, 2)
    losses, differences = figure.axes
    for name, colour in zip([name for name in curves if name != OURS], COLOURS, strict=False):
        _line(losses, curves[name], name, color=colour, linewidth=6, alpha=0.35)
        apart = [
            {"step": mine["step"], "loss": abs(mine["loss"] - theirs["loss"])}
            for mine, theirs in zip(curves[OURS], curves[name], strict=True)
        ]
        _line(differences, apart, f"|{OURS} - {name}|", color=colour, linewidth=1.2)
    _line(losses, curves[OURS], OURS, color="black", linewidth=1)
    differences.axhline(tolerance, color="black", linestyle="--", label=f"tolerance of {of}")
    differences.set_yscale("symlog", linthresh=tolerance or 1e-6)
    differences.set_ylim(bottom=-0.1 * (tolerance or 1e-6))  # so that a line at 0 is seen
    differences.set_ylabel(f"difference ({UNITS})")
    _save(figure, file)


def _figure(title: str, panels: int) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * panels + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    figure.subplots(panels, 1, sharex=True)
    figure.axes[0].set_ylabel(f"loss ({UNITS})")
    figure.axes[-1].set_xlabel("step")
    return figure


def _line(axes: Any, rows: Rows, name: str, **style: Any) -> None:
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, label=name, marker="." if len(rows) == 1 else None, **style)


def _save(figure: Any, file: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.savefig(file)
