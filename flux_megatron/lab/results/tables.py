"""A report as tables of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flux_megatron.lab.results.report import Report
from flux_megatron.lab.results.statistics import COVERAGE, Speedup
from flux_megatron.lab.results.summary import ArmSummary, Parity

if TYPE_CHECKING:
    from rich.table import Table

SURE = f"{COVERAGE:.0%}"
# What numbers the runs comes first, and only where there are several; > is of numbers.
HEADS = {
    "step time": f"run arm >timed >step_ms {SURE} p20_to_p80 >tokens/s >MFU",
    "speedup": f"run arm_over_baseline >speedup {SURE} verdict paper",
    "loss: absolute differences, nats": "run arms >common >max >mean >first_at bound verdict",
}
Row = Sequence[str]


def tables(report: Report) -> list[Table]:
    """Arms, speedups, losses; those without a row are left out."""
    from rich.box import SIMPLE
    from rich.table import Table

    found, first = [], 0 if len(report.runs) > 1 else 1
    for (title, heads), rows in zip(HEADS.items(), _rows(report), strict=True):
        table = Table(title=title, title_justify="left", box=SIMPLE)
        for head in heads.split()[first:]:
            table.add_column(
                head.lstrip(">").replace("_", " "),
                justify="right" if head.startswith(">") else "left",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*row[first:])
        found += [table] if rows else []
    return found


def remarks(report: Report) -> list[str]:
    """What the tables do not show: arms without iterations, restarts, what was left out."""
    found = []
    for run, arms in zip(report.runs, report.arms, strict=True):
        if missing := [arm for arm in report.experiment.arms if arm not in arms]:
            found.append(f"{run.folder}: no iterations of {', '.join(missing)}")
        for arm, one in arms.items():
            found += [f"{run.folder}/{arm}: {text}" for text in _events(one)]
    if report.on_cpu:
        found.append("on a CPU kernels are interpreted: these times say nothing of a GPU")
    if any(one.paper for one in report.speedups):
        found.append(f"paper: {report.experiment.paper.get('section', 'section not given')}")
    return found


def _rows(report: Report) -> Iterable[list[Row]]:
    yield [
        (str(index + 1), arm, str(one.timed), *_times(one))
        for index, arms in enumerate(report.arms)
        for arm, one in arms.items()
    ]
    yield [
        ("all" if one.run is None else str(one.run + 1), f"{one.arm} over {one.baseline}",
         f"{one.speedup.ratio:.3f}x", _interval(one.speedup), one.speedup.verdict,
         one.paper or "-")
        for one in report.speedups
    ]  # fmt: skip
    yield [
        (str(one.run + 1), f"{one.arm} and {one.baseline}", *_parity(one.parity))
        for one in report.losses
    ]


def _times(one: ArmSummary) -> Row:
    if one.step is None:
        return ["-"] * 5
    return (
        _milliseconds(one.step.median),
        " to ".join(map(_milliseconds, one.step.interval or ())) or "too few",
        " to ".join(map(_milliseconds, one.spread or ())) or "-",
        f"{one.tokens_per_second:,.0f}",
        "-" if one.mfu is None else f"{one.mfu:.1%}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 1 else f"{seconds * 1e3:.1f}"


def _interval(one: Speedup) -> str:
    return " to ".join(f"{bound:.3f}" for bound in one.interval or ()) or "-"


def _parity(one: Parity | None) -> Row:
    if one is None:
        return "0", "-", "-", "-", "-", "no common iteration"
    return (
        str(one.common),
        f"{one.max:.2e}",
        f"{one.mean:.2e}",
        str(one.first_different or "-"),
        f"{one.measure} {one.bound:g}",
        "within" if one.within else "DIFFERENT",
    )


def _events(one: ArmSummary) -> list[str]:
    at = ", ".join(map(str, one.restarts))
    found = {
        f"restarted at iteration {at}": len(one.restarts),
        f"{one.replaced} iterations done again after a restart": one.replaced,
        f"{one.skipped} skipped iterations, {one.nan} of them without a finite loss": one.skipped,
        f"{one.torn} unfinished last lines left out": one.torn,
    }
    return [text for text, count in found.items() if count]
