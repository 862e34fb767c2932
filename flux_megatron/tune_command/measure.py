"""`flux-megatron tune`: measure the plans of a model's problems ahead of a run, and keep them.

`request` has what is asked for. Every rank runs `tune`, rank 0 shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flux_megatron import settings
from flux_megatron.expert_parallel.plans import ExpertEntry
from flux_megatron.overlap import registry
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.workspace import workspace
from flux_megatron.tune_command.rank_processes import rendezvous
from flux_megatron.tuning import environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry

Advance = Callable[[Problem, "Plan | None", int], None]


def tune(problems: Sequence[Problem], again: bool, out: Path | None, name: str) -> None:
    """Measure what has not been measured here, on every rank of a torchrun job.

    Rank 0 shows tables, writes the user's cache and, if given, a file in the folder `out`, called
    after `name`. `again` measures what is known too.
    """
    device = join(problems[0].device)
    group = dist.group.WORLD
    assert group is not None, "joined above"
    try:
        entries = _tune_all(problems, group, device, again)
        if dist.get_rank() == 0:
            where = plan_cache.user_folder(settings.get().cache)
            Console().print(f"{len(entries)} plans kept in {where}", soft_wrap=True)
        if out is not None and dist.get_rank() == 0:
            connections = environment.of(device).max_connections
            file = out / f"{name}_tp{group.size()}_connections-{connections}.json"
            plan_cache.write_file(file, entries)
            Console().print(f"{len(entries)} entries in {file}", soft_wrap=True)
    finally:
        dist.destroy_process_group()


def join(device_type: str, limit: timedelta | None = None) -> torch.device:
    """Become a rank of torchrun's job; the device of this rank. `limit` is that of collectives."""
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=limit, **rendezvous())
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=limit, device_id=device, **rendezvous())
    return device


def _tune_all(
    problems: Sequence[Problem], group: dist.ProcessGroup, device: torch.device, again: bool
) -> list[Entry]:
    folder = settings.get().cache
    cache = plan_cache.opened(Entry, folder, device)
    plans = {problem: _plans(problem, group, device) for problem in problems}
    entries = []
    with _display(sum(map(len, plans.values()))) as (console, advance):
        for problem in problems:
            known = tuner.leaders(group, not again and cache.find(problem) is not None)
            entry = cache.find(problem) if known else None
            if known:
                advance(problem, None, len(plans[problem]))
            else:
                entry = _measured(problem, plans[problem], group, device, advance)
            if dist.get_rank() != 0:
                continue
            if entry is None:
                console.print(f"[red]{problem}: `sequential` failed, nothing is kept[/red]")
                continue
            if not known:
                plan_cache.keep(entry, folder, device)
            entries.append(entry)
            console.print(table(entry, known))
    return entries


def _plans(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> list[Plan]:
    space = workspace(group, device)
    names, _ = registry.overlapping(problem, "auto", space.unavailable)
    return tuner.candidates(problem, names)


def _measured(
    problem: Problem, plans: Sequence[Plan], group: dist.ProcessGroup, device: torch.device,
    advance: Advance,
) -> Entry | None:  # fmt: skip
    turns = [0]

    def watch(plan: Plan) -> None:
        advance(problem, plan, min(turns[0], 1))  # the one before is done
        turns[0] += 1

    entry = tuner.measure(problem, plans, group, device, watch=watch)
    advance(problem, None, len(plans) - max(turns[0] - 1, 0))
    return entry


@contextmanager
def _display(total: int) -> Iterator[tuple[Console, Advance]]:
    """A progress bar over all plans, on rank 0."""
    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("", total=total)

        def advance(problem: Problem, plan: Plan | None, done: int) -> None:
            doing = f"{problem}: {label(plan)}" if plan else str(problem)
            progress.update(task, description=doing, advance=done)

        yield progress.console, advance


def table(entry: Entry | ExpertEntry, known: bool) -> Table:
    """The plans of a problem from the fastest to those that failed; the winner in bold."""
    note = "known" if known else f"{entry.rounds} rounds"
    title = f"{entry.problem} ({note}, noise {entry.noise_us:.1f} us)"
    table = Table("plan", "median us", "of sequential", title=title, title_justify="left")
    plain = next(one.median_us for one in entry.measured if one.plan.strategy == "sequential")
    for one in entry.measured:
        style = "bold green" if one.plan == entry.plan else None
        ratio = f"{one.median_us / plain:.3f}"
        table.add_row(label(one.plan), f"{one.median_us:.1f}", ratio, style=style)
    for lost in entry.failed:
        table.add_row(label(lost.plan), "failed", lost.reason.splitlines()[0][:100], style="red")
    return table


def label(plan: Plan) -> str:
    """The plan in a few words: its strategy and what differs from that strategy's plain form."""
    numbers = {f.name: getattr(plan, f.name) for f in fields(Plan) if f.name != "strategy"}
    tile = numbers.pop("tile")
    plain = Plan(plan.strategy)
    words = [f"{name}={value}" for name, value in numbers.items() if value != getattr(plain, name)]
    if tile != Tile():
        words.append(f"{tile.block_m}x{tile.block_n}x{tile.block_k}")
        words.append(f"g{tile.group_m} w{tile.num_warps} s{tile.num_stages}" + " tma" * tile.tma)
    return " ".join([plan.strategy, *words])
