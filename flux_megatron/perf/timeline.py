"""The event simulation of a step as a picture: a panel for each arm, in it a row for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flux_megatron.perf.events import Stream, Task
from flux_megatron.perf.schedule import Costs
from flux_megatron.perf.simulation import simulate
from flux_megatron.perf.workload import Arm

SHOWN_ROUNDS = 2  # micro-batches that are drawn, for each pipeline rank
COLOURS = {
    "forward": "#2980b9",
    "backward": "#27ae60",
    "send": "#f1c40f",
    "gather": "#e67e22",
    "reduce": "#c0392b",
    "tied": "#8e44ad",
    "optimizer": "#7f8c8d",
}
NAMES = {
    "gather": "gather parameters",
    "reduce": "sum gradients",
    "tied": "sum tied embeddings",
}


def draw(arms: Mapping[Arm, Costs], file: Path, title: str) -> None:
    """Write a PNG of the arms' steps, on one scale. Of many micro-batches only the first are
    simulated and drawn; the title says so.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(
        len(arms), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(14, len(arms) * (1 + 0.35 * max(costs.pp for costs in arms.values()))),
    )  # fmt: skip
    for panel, (arm, costs) in zip(panels.flat, arms.items(), strict=True):
        shown = shorter(costs)
        _panel(panel, simulate(shown).tasks)
        panel.set_title(
            f"{arm}: {shown.micro_batches} of {costs.micro_batches} micro-batches",
            fontsize=9, loc="left",
        )  # fmt: skip
        panel.set_yticks(range(costs.pp), [f"rank {rank}" for rank in range(costs.pp)], fontsize=7)
        panel.invert_yaxis()
    panels[-1, 0].set_xlabel("ms")
    figure.suptitle(title, fontsize=10)
    patches = [Patch(color=colour, label=NAMES.get(kind, kind)) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def shorter(costs: Costs) -> Costs:
    """The same with as many micro-batches as the eye can distinguish."""
    return replace(costs, micro_batches=min(costs.micro_batches, SHOWN_ROUNDS * max(4, costs.pp)))


def _panel(panel: Any, tasks: list[Task]) -> None:
    """Compute streams as bars, collectives of replicas as thin ones below; links are left out."""
    bars: dict[tuple[Stream, str], list[tuple[float, float]]] = {}
    for task in tasks:
        for stream in task.streams:
            if stream.kind != "link" and task.time_us > 0:
                span = (task.start_us / 1e3, task.time_us / 1e3)
                bars.setdefault((stream, task.kind), []).append(span)
    for (stream, kind), spans in bars.items():
        low, high = (-0.4, 0.6) if stream.kind == "compute" else (0.22, 0.18)
        panel.broken_barh(
            spans, (stream.rank + low, high), color=COLOURS[kind], edgecolor="white", linewidth=0.3
        )
