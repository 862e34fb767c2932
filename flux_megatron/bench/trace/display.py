"""The output of a traced run on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flux_megatron.bench.trace.timeline import Timeline


def table(timelines: Sequence[Timeline], title: str) -> Table:
    """Times in microseconds, a row a rank; waits inside kernels where they were recorded."""
    result = Table(title=title)
    for column in ("rank", "time", "compute", "communication", "hidden", "wait kernels"):
        result.add_column(column, justify="right")
    result.add_column("a CTA waits")
    for timeline in timelines:
        summary = timeline.summary()
        share = summary["hidden_share"]
        numbers = [summary[f"{name}_us"] for name in ("time", "compute", "communication")]
        waits = [f"{kernel.kernel} {kernel.mean_us:.1f}" for kernel in timeline.kernels]
        result.add_row(
            str(timeline.rank),
            *(f"{number:.1f}" for number in numbers),
            "-" if share is None else f"{share:.1%}",
            f"{summary['wait_kernels_us']:.1f}",
            ", ".join(waits) or "-",
        )
    return result
