"""A report as tables of texts, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux_megatron.lab.results.report import Report
from flux_megatron.lab.results.statistics import COVERAGE, Speedup
from flux_megatron.lab.results.summary import ArmSummary, Parity

if TYPE_CHECKING:
    from rich.table import Table


NUMBERS = {"timed", "step ms", "tokens/s", "MFU", "common", "speedup", "max", "mean", "first at"}


@dataclass(frozen=True)
class TextTable:
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(report: Report) -> list[TextTable]:
    """Arms, speedups, losses; those without a row are left out.

    The first column, which numbers the runs, only where there are several.
    """
    found = [table for table in (_arms(report), _speedups(report), _losses(report)) if table.rows]
    if len(report.runs) > 1:
        return found
    return [TextTable(one.title, one.head[1:], [row[1:] for row in one.rows]) for one in found]


def remarks(report: Report) -> list[str]:
    """What the tables do not show: arms without iterations, restarts, what was left out."""
    found = []
    for run, arms in zip(report.runs, report.arms, strict=True):
        missing = [arm for arm in report.experiment.arms if arm not in arms]
        if missing:
            found.append(f"{run.folder}: no iterations of {', '.join(missing)}")
        for arm, one in arms.items():
            found += [f"{run.folder}/{arm}: {text}" for text in _events(one)]
    if report.on_cpu:
        found.append("on a CPU kernels are interpreted: these times say nothing of a GPU")
    if any(one.paper for one in report.speedups):
        found.append(f"paper: {report.experiment.paper.get('section', 'section not given')}")
    return found


def as_rich(table: TextTable) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=table.title, title_justify="left", box=SIMPLE)
    for name in table.head:
        shown.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def as_markdown(report: Report) -> str:
    lines = [f"# {report.experiment.name}", "", f"{report.machine}.", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", _line(table.head), _line("---" for _ in table.head)]
        lines += [*map(_line, table.rows), ""]
    lines += [f"- {remark}" for remark in remarks(report)]
    return "\n".join(lines).rstrip() + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _arms(report: Report) -> TextTable:
    head = ("run", "arm", "timed", "step ms", f"{COVERAGE:.0%}", "p20 to p80", "tokens/s", "MFU")
    rows = [
        (str(index + 1), arm, str(one.timed), *_times(one))
        for index, arms in enumerate(report.arms)
        for arm, one in arms.items()
    ]
    return TextTable("step time", head, rows)


def _times(one: ArmSummary) -> tuple[str, str, str, str, str]:
    if one.step is None or one.tokens_per_second is None:
        return "-", "-", "-", "-", "-"
    return (
        _milliseconds(one.step.median),
        "too few" if one.step.interval is None else _range(one.step.interval),
        "-" if one.spread is None else _range(one.spread),
        f"{one.tokens_per_second:,.0f}",
        "-" if one.mfu is None else f"{one.mfu:.1%}",
    )


def _range(seconds: tuple[float, float]) -> str:
    return f"{_milliseconds(seconds[0])} to {_milliseconds(seconds[1])}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 1 else f"{seconds * 1e3:.1f}"


def _speedups(report: Report) -> TextTable:
    head = ("run", "arm over baseline", "speedup", f"{COVERAGE:.0%}", "verdict", "paper")
    rows = [
        (
            "all" if one.run is None else str(one.run + 1),
            f"{one.arm} over {one.baseline}",
            f"{one.speedup.ratio:.3f}x",
            _interval(one.speedup),
            one.speedup.verdict,
            one.paper or "-",
        )
        for one in report.speedups
    ]
    return TextTable("speedup", head, rows)


def _interval(speedup: Speedup) -> str:
    if speedup.interval is None:
        return "-"
    return f"{speedup.interval[0]:.3f} to {speedup.interval[1]:.3f}"


def _losses(report: Report) -> TextTable:
    head = ("run", "arms", "common", "max", "mean", "first at", "bound", "verdict")
    rows = [
        (str(one.run + 1), f"{one.arm} and {one.baseline}", *_parity(one.parity))
        for one in report.losses
    ]
    return TextTable("loss: absolute differences, nats", head, rows)


def _parity(parity: Parity | None) -> tuple[str, ...]:
    if parity is None:
        return "0", "-", "-", "-", "-", "no common iteration"
    return (
        str(parity.common),
        f"{parity.max:.2e}",
        f"{parity.mean:.2e}",
        _or_dash(parity.first_different),
        f"{parity.measure} {parity.bound:g}",
        "within" if parity.within else "DIFFERENT",
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


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
