"""What all plots of rows share: their cases, candidates, colours and empty panels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flux_megatron.bench.records import OK, Row

COLOURS = {
    "auto": "#c0392b",
    "megatron": "#7f8c8d",
    "async_tp": "#2980b9",
    "te_ring": "#27ae60",
    "te": "#27ae60",
    "te_pipeline": "#a2d9a5",
    "xformers": "#8e44ad",
    "quack": "#d68910",
}
SERIAL = "#2c3e50"  # beside the candidates, where it is drawn
Key = tuple[str, str, str, int]
Cases = dict[Key, dict[str, Row]]


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows + 0.4),
        squeeze=False,
        layout="constrained",
    )
    plt.close(figure)  # it lives on without pyplot
    return figure, [*axes.flat]


def candidates(groups: Iterable[dict[str, Row]]) -> list[str]:
    """The candidates of a plot: `auto`, Megatron, and every competitor that has run."""
    seen = {row.candidate for group in groups for row in group.values() if row.status == OK}
    return [name for name in COLOURS if name in seen]


def machine(cases: Cases) -> str:
    """The GPUs of the plot's rows."""
    rows = [row for group in cases.values() for row in group.values()]
    machines = {f"{row.provenance.world_size} x {row.provenance.gpu}" for row in rows}
    return " and ".join(sorted(machines))
