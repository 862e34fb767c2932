"""What rank 0 shows: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flux_megatron.lab.train.config import TrainConfig


class StepDisplay:
    """A context: `show(row)` after each step, with a row of metrics.jsonl."""

    def __init__(self, console: Console, config: TrainConfig, start: int) -> None:
        self.console, self.config = console, config
        self.progress = Progress(
            TextColumn(f"{config.layers:5}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=config.train.steps, completed=start, facts="")

    def __enter__(self) -> StepDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, row: dict[str, Any]) -> None:
        facts = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
        if row["grad_norm"] is not None:
            facts += f"  grad norm {row['grad_norm']:.3f}"
        if row["overlapped_share"] is not None:
            facts += f"  overlapped {row['overlapped_share']:.0%}"
        self.progress.update(self.task, completed=row["step"], facts=facts)
        loop = self.config.train
        if self.progress.disable and (
            row["step"] % loop.log_every == 0 or row["step"] == loop.steps
        ):
            self.console.print(
                f"{self.config.layers} step {row['step']}/{loop.steps}  {facts}", highlight=False
            )


def summary_table(title: str, summary: dict[str, Any]) -> Table:
    """The counts of one run's summary.json."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("steps", f"{summary['first_step']} to {summary['last_step']}")
    table.add_row("final loss", f"{summary['final_loss']:.6f}")
    table.add_row("time", f"{summary['seconds']:.1f} s")
    for name, count in summary["calls"].items():
        table.add_row(f"calls: {name}", f"{count}")
    for name, count in summary["fallbacks"].items():
        table.add_row(f"fallback: {name}", f"{count}")
    if summary["eligible"]:
        table.add_row("eligible calls, all ranks", f"{summary['eligible']}")
        table.add_row("overlapped", f"{summary['overlapped']}")
        table.add_row("sequential by their plan", f"{summary['chosen_sequential']}")
        table.add_row("fallbacks with a reason", f"{sum(summary['fallbacks'].values())}")
        table.add_row("silent fallbacks", f"{summary['silent']}")
    return table
