"""`flux-megatron tune`: measure the plans of a model's problems ahead of a run, and keep them.

`request` has what is asked for. Every rank runs `tune`, rank 0 shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.status import Status
from rich.table import Table

from flux_megatron import settings
from flux_megatron.errors import RunFailed
from flux_megatron.overlap import registry
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tune_command.rank_processes import rendezvous
from flux_megatron.tuning import environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry

Watch = Callable[[Plan], None]


def tune(problems: Sequence[Problem], again: bool, out: Path | None, name: str) -> None:
    """Measure what has not been measured here, on every rank of a torchrun job.

    Rank 0 shows tables, writes the user's cache and, if given, a file in the folder `out`, called
    after `name`. `again` measures what is known too.
    """
    with joined(problems[0].device) as (group, device):
        find = plan_cache.opened(settings.get().cache, device).find
        measured = partial(_measured, group, device)
        entries = measure_all(problems, group, device, again, find, measured)
        if out is not None and dist.get_rank() == 0:
            connections = environment.of(device).max_connections
            file = out / f"{name}_tp{group.size()}_connections-{connections}.json"
            plan_cache.write_file(file, entries)
            Console().print(f"{len(entries)} entries in {file}", soft_wrap=True)
        refuse_lacking(problems, entries)


@contextmanager
def joined(
    device_type: str, limit: timedelta | None = None
) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The group of all ranks of torchrun's job, and this one's device. `limit` is that of
    collectives.
    """
    device = torch.device("cpu")
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=limit, **rendezvous())
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device, **rendezvous())
    group = dist.group.WORLD
    assert group is not None, "initialised above"
    try:
        yield group, device
    finally:
        dist.destroy_process_group()


def measure_all(
    problems: Sequence[Problem], group: dist.ProcessGroup, device: torch.device, again: bool,
    find: Callable[[Problem], Entry | None], measure: Callable[[Problem, Watch], Entry],
) -> list[Entry]:  # fmt: skip
    """The entry of each problem, as found or as measured now. Rank 0 has them; it shows tables and
    writes the user's cache.
    """
    console, entries = Console(quiet=dist.get_rank() != 0), []
    with console.status("") as status:
        for number, problem in enumerate(problems, start=1):
            watch = partial(_show, status, f"{number} of {len(problems)}: {problem}")
            entry = None if again else find(problem)
            known = tuner.leaders(group, entry is not None)
            try:
                entry = entry if known else measure(problem, watch)
            except tuner.NotMeasured as error:
                console.print(f"{problem}: not measured: {error}", style="red", markup=False)
                continue
            if dist.get_rank() != 0 or entry is None:
                continue
            if not known:
                plan_cache.keep(entry, settings.get().cache, device)
            entries.append(entry)
            console.print(table(entry, known))
    where = plan_cache.user_folder(settings.get().cache)
    console.print(f"{len(entries)} plans kept in {where}", soft_wrap=True)
    return entries


def refuse_lacking(problems: Sequence[Problem], entries: Sequence[Entry]) -> None:
    """`RunFailed` on rank 0 where a problem was not measured."""
    lacking = len(problems) - len(entries)
    if lacking and dist.get_rank() == 0:
        raise RunFailed(f"{lacking} of {len(problems)} problems were not measured, see above")


def _show(status: Status, title: str, plan: Plan) -> None:
    status.update(f"{title}: {label(plan)}")


def _measured(
    group: dist.ProcessGroup, device: torch.device, problem: Problem, watch: Watch
) -> Entry:
    missing = workspace(group, device).missing
    names = [*registry.runnable(problem, "auto", missing)]
    plans = tuner.candidates(problem, names, missing)
    return tuner.measure(problem, plans, group, device, watch=watch)


def table(entry: Entry, known: bool) -> Table:
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
