"""One transformer layer of one GPU over time: its pieces, and what tensor parallelism adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flux_megatron.perf import layer
from flux_megatron.perf.layer import Piece
from flux_megatron.perf.workload import Arm, Workload

EXPOSED = "#c0392b"  # tensor-parallel communication that no GEMM hides
COLOURS = {"forward": "#2980b9", "backward": "#27ae60"}
NAMED = 0.02  # of the width: a narrower bar has no name


Kind = Literal["forward", "backward", "exposed"]


class Span(NamedTuple):
    """A piece, or the exposed communication after it."""

    name: str
    kind: Kind
    start_us: float
    time_us: float


def spans(pieces: Sequence[Piece]) -> list[Span]:
    """The forward in order, then the backward in reverse; each piece's computation, then its
    exposed communication, which the model does not place more closely.
    """
    found: list[Span] = []
    for piece in pieces:
        _append(found, piece.name, "forward", piece.forward_us, piece.forward_exposed_us)
    for piece in reversed(pieces):
        _append(found, piece.name, "backward", piece.backward_us, piece.backward_exposed_us)
    return found


def _append(
    found: list[Span], name: str, direction: Kind, whole_us: float, exposed_us: float
) -> None:
    parts: tuple[tuple[Kind, float], ...] = (
        (direction, whole_us - exposed_us),
        ("exposed", exposed_us),
    )
    for kind, time_us in parts:
        if time_us > 0:
            start_us = found[-1].start_us + found[-1].time_us if found else 0.0
            found.append(Span(name, kind, start_us, time_us))


def panel(axes: Any, workloads: Mapping[Arm, Workload]) -> None:
    """A row for each arm, on one axis of time; its label has the exposed share."""
    rows = {arm: spans(layer.pieces(workload)) for arm, workload in workloads.items()}
    longest_us = max(row[-1].start_us + row[-1].time_us for row in rows.values())
    labels = []
    for place, (arm, row) in enumerate(rows.items()):
        for span in row:
            _bar(axes, span, place, longest_us)
        whole_us = sum(span.time_us for span in row)
        exposed_us = sum(span.time_us for span in row if span.kind == "exposed")
        labels.append(f"{arm}: {exposed_us / whole_us:.0%} exposed")
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=8)
    axes.set_title(
        "one layer of one GPU, one micro-batch: forward, backward, exposed tensor-parallel "
        "communication", fontsize=9, loc="left",
    )  # fmt: skip


def _bar(axes: Any, span: Span, place: int, longest_us: float) -> None:
    colour = EXPOSED if span.kind == "exposed" else COLOURS[span.kind]
    start, width = span.start_us / 1e3, span.time_us / 1e3
    axes.broken_barh(
        [(start, width)], (place - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3
    )
    if span.kind != "exposed" and span.time_us > NAMED * longest_us:
        middle = start + width / 2
        axes.text(middle, place, span.name, size=6, ha="center", va="center", clip_on=True)
