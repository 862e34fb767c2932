"""`flux-megatron results`: what the arms of runs reached, beside the paper's figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or repeats")]


def results(
    runs: Runs,
    json_: Annotated[Path | None, typer.Option("--json", help="All figures; - for stdout")] = None,
    loss_bound: Annotated[float | None, typer.Option(help="Nats; default by dtype")] = None,
) -> None:
    """Step time, speedup with its interval, and loss parity of the arms of launched experiments."""
    from rich.console import Console

    from flux_megatron import option_values
    from flux_megatron.lab.results import tables
    from flux_megatron.lab.results.report import read, reports

    option_values.number("--loss-bound", loss_bound, zero=True, unit="nats")
    folders = dict.fromkeys(run.resolve() for run in runs)  # globs may name one twice
    found = reports([one for run in folders for one in read(run)], loss_bound)
    if json_ is not None:
        option_values.json_target(json_)
    # what a program reads on stdout has no table in it
    console = Console(stderr=json_ == option_values.STDOUT)
    if not console.is_terminal:
        console = Console(stderr=console.stderr, width=120)
    for report in found:
        console.rule(f"{report.experiment.name}: {report.machine}")
        for table in tables.tables(report):
            console.print(table)
        for remark in tables.remarks(report):
            console.print(remark, soft_wrap=True, highlight=False, markup=False)
    if json_ is not None:
        option_values.write_json(json_, [report.plain() for report in found])
