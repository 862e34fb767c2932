"""A predicted step as a picture: one layer of every arm, then a panel for each arm's event
simulation with a row for each pipeline rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flux_megatron.perf import layer_timeline, step
from flux_megatron.perf.events import Stream, Task
from flux_megatron.perf.schedule import Costs
from flux_megatron.perf.simulation import simulate
from flux_megatron.perf.workload import Arm, Workload

SHOWN_ROUNDS = 2  # micro-batches that are drawn, for each pipeline rank
COLOURS = {
    **layer_timeline.COLOURS,
    "exposed": layer_timeline.EXPOSED,
    "send": "#f1c40f",
    "gather": "#e67e22",
    "reduce": "#16a085",
    "tied": "#8e44ad",
    "optimizer": "#7f8c8d",
}
NAMES = {
    "exposed": "exposed tensor-parallel communication",
    "gather": "gather parameters",
    "reduce": "sum gradients",
    "tied": "sum tied embeddings",
}


def draw(workloads: Mapping[Arm, Workload], file: Path, title: str) -> None:
    """Write a PNG: a layer of each arm on one scale, then the arms' steps on one scale. Of many
    micro-batches only the first are simulated and drawn; the titles say so.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    costs = {arm: step.costs(workload) for arm, workload in workloads.items()}
    stages = max(one.pp for one in costs.values())
    heights = [0.7 + 0.4 * len(costs), *[1 + 0.35 * stages] * len(costs)]
    figure, panels = plt.subplots(
        len(heights), 1, squeeze=False, layout="constrained",
        height_ratios=heights, figsize=(14, sum(heights) + 0.8),
    )  # fmt: skip
    of_layer, *of_steps = panels.flat
    layer_timeline.panel(of_layer, workloads)
    for panel, (arm, one) in zip(of_steps, costs.items(), strict=True):
        panel.sharex(of_steps[0])
        shown = shorter(one)
        _panel(panel, simulate(shown).tasks)
        panel.set_title(
            f"{arm}: {shown.micro_batches} of {one.micro_batches} micro-batches, a row for each "
            "pipeline rank", fontsize=9, loc="left",
        )  # fmt: skip
        panel.set_yticks(range(one.pp), [f"rank {rank}" for rank in range(one.pp)], fontsize=7)
        panel.invert_yaxis()
    of_steps[-1].set_xlabel("ms")
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
