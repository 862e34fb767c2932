"""A picture of timelines: a panel for each rank with computation, communication and waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flux_megatron.bench.trace.timeline import (
    COMMUNICATION,
    COMPUTE,
    PASS,
    WAIT,
    KernelWaits,
    Timeline,
    waiting_over_time,
)

COLOURS = {COMPUTE: "#2980b9", COMMUNICATION: "#c0392b", WAIT: "#f39c12", PASS: "#bdc3c7"}
ROWS = (PASS, COMPUTE, COMMUNICATION, WAIT)  # from top to bottom
LABELLED = 0.05  # of the width: a narrower bar has no name


def draw(timelines: Sequence[Timeline], title: str, file: Path) -> None:
    """One panel a rank, on one axis of time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(14, 1.9 * len(timelines) + 0.8),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    last_us = max((span.end_us for t in timelines for span in t.spans), default=1.0)
    for axis, timeline in zip(axes.flat, timelines, strict=True):
        _panel(axis, timeline, last_us)
    axes.flat[-1].set_xlabel("microseconds")
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _panel(axis: Any, timeline: Timeline, last_us: float) -> None:
    rows = [*ROWS, "waiting\nprograms"] if timeline.kernels else [*ROWS]
    for place, lane in enumerate(ROWS):
        spans = timeline.of(lane)
        bars = [(span.begin_us, span.end_us - span.begin_us) for span in spans]
        edge = {"edgecolor": "white", "linewidth": 0.4}
        axis.broken_barh(bars, (-place - 0.4, 0.8), facecolors=COLOURS[lane], **edge)
        for span, (begin, width) in zip(spans, bars, strict=True):
            if width > LABELLED * last_us:
                name = _short(span.name, int(width / last_us * 160))
                axis.text(
                    begin + width / 2, -place, name, size=6, ha="center", va="center", clip_on=True
                )
    for kernel in timeline.kernels:
        _waiting(axis, kernel, bottom=-len(ROWS) - 0.4)
    axis.set_yticks([-place for place in range(len(rows))], rows, fontsize=8)
    axis.set_xlim(0, last_us)
    axis.set_title(_caption(timeline), fontsize=8, loc="left")


def _waiting(axis: Any, kernel: KernelWaits, bottom: float) -> None:
    """The share of a kernel's CTAs that wait, over time: full height is all."""
    steps = waiting_over_time(kernel)
    if steps:
        times = [time_us for time_us, _ in steps]
        heights = [bottom + 0.8 * waiting / kernel.ctas for _, waiting in steps]
        axis.fill_between(times, bottom, heights, step="post", color=COLOURS[WAIT])


def _short(name: str, letters: int) -> str:
    name = name.removesuffix("_kernel")
    return name if len(name) <= letters else name[: max(1, letters - 1)] + "…"


def _caption(timeline: Timeline) -> str:
    label = f"rank {timeline.rank}: {timeline.time_us:.0f} us"
    share = timeline.hidden_share
    if share is not None:
        label += f", communication {timeline.communication_us:.0f} us, {share:.0%} of it hidden"
    for kernel in timeline.kernels:
        label += f"; {kernel.kernel}: a CTA waits {kernel.mean_us:.1f} us"
    return label
