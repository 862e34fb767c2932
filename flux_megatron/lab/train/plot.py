"""A picture of losses over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS = "flux"
STOCK = {"linewidth": 6, "alpha": 0.35}


def draw(file: Path, curves: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Write a PNG: ours as a thin line on the wide pale ones of stock runs, so that equal curves
    are both seen.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots()
    for name in sorted(curves, key=lambda name: name == OURS):
        steps, losses = zip(*((row["step"], row["loss"]) for row in curves[name]), strict=True)
        style: Any = {"color": "black", "linewidth": 1} if name == OURS else STOCK
        axes.plot(steps, losses, label=name, marker="." if len(steps) == 1 else None, **style)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file)
