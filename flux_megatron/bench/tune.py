"""`flux-megatron tune`: measure the plans of a model's problems ahead of a run, and keep them.

The parent starts one rank a GPU under torchrun; every rank runs `tune`, rank 0 shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flux_megatron import settings
from flux_megatron.bench import suites
from flux_megatron.expert_parallel.plans import ExpertEntry
from flux_megatron.overlap import registry
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.perf import hardware
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.workspace import workspace
from flux_megatron.train.config import TrainConfig
from flux_megatron.tuning import choice, environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry

Advance = Callable[[Problem, "Plan | None", int], None]


def problems_of_suite(
    suite: str, Ms: Sequence[int], tp: int, dtype: str, device: str, scale: int = 1,
    sequence_parallel: bool = True,
) -> list[Problem]:  # fmt: skip
    """The problems of a model of `bench.suites`, forward and backward."""
    problems = [
        Problem(Pattern(pattern), case.M, case.N, case.K, dtype, tp, case.layout, device)
        for pattern in (COLUMN, ROW)
        for case in suites.cases(suite, str(pattern), tuple(Ms), tp, scale)
    ]
    return problems if sequence_parallel else all_reduced(problems)


def all_reduced(problems: Sequence[Problem]) -> list[Problem]:
    """The same layers' problems without sequence parallelism: a row layer's forward and a column
    layer's dgrad.
    """
    return [replace(one, pattern=Pattern.GEMM_AR) for one in problems if one.spec.scatters]


def problems_of_config(config: TrainConfig, device: str) -> list[Problem]:
    """The problems of a training run: each linear layer's forward and its dual, and the LM head's.

    `ValueError` if the run has none.
    """
    model, tp = config.model, config.parallel.tp
    if tp == 1:
        raise ValueError("parallel.tp=1 given: only layers over several ranks have plans")
    fc1 = 2 * model.ffn if model.swiglu else model.ffn
    column = dict.fromkeys([3 * model.hidden, fc1, config.padded_vocab])
    row = dict.fromkeys([model.hidden, model.ffn])
    M, hidden = model.seq_length * config.train.micro_batch, model.hidden
    shapes = [(COLUMN, N, hidden) for N in column] + [(ROW, hidden, K) for K in row]
    forward = [
        Problem(pattern, M, N, K, config.train.dtype, tp, device=device) for pattern, N, K in shapes
    ]
    problems = forward + [problem.dual for problem in forward]
    return problems if config.parallel.sequence_parallel else all_reduced(problems)


def and_beside(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem alone, and beside others."""
    return [replace(problem, beside=beside) for problem in problems for beside in (False, True)]


def start_ranks(tp: int, on_gpu: bool, connections: int, arguments: Sequence[str]) -> int:
    """Run `flux-megatron ARGUMENTS` on `tp` ranks of this machine; their exit code.

    They get CUDA_DEVICE_MAX_CONNECTIONS=`connections`, or none for 0.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", f"--nproc-per-node={tp}", "-m", "flux_megatron.cli", *arguments]
    cores = len(os.sched_getaffinity(0))
    variables = {
        "OMP_NUM_THREADS": str(max(1, cores // tp)),
        "FLUX_MEGATRON_TIMEOUT_S": "30",  # a plan that hangs has failed
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
    }
    if not connections:
        del variables["CUDA_DEVICE_MAX_CONNECTIONS"]
    if not on_gpu:
        variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=variables, check=False).returncode


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
        if out is not None and dist.get_rank() == 0:
            connections = environment.of(device).max_connections
            file = out / f"{name}_tp{group.size()}_connections-{connections}.json"
            plan_cache.write_file(file, entries)
            Console().print(f"{len(entries)} entries in {file}")
    finally:
        dist.destroy_process_group()


def join(device_type: str) -> torch.device:
    """Become a rank of torchrun's job; the device of this rank."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _tune_all(
    problems: Sequence[Problem], group: dist.ProcessGroup, device: torch.device, again: bool
) -> list[Entry]:
    folder = settings.get().cache
    cache = choice.opened(folder, device)
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
                choice.keep(entry, folder, device)
            entries.append(entry)
            console.print(table(entry, known))
    return entries


def _plans(problem: Problem, group: dist.ProcessGroup, device: torch.device) -> list[Plan]:
    space = workspace(group, device)
    names, _ = registry.overlapping(problem, "auto", space.unavailable)
    where = environment.of(device)
    facts = hardware.find(where.gpu, where.link)
    return tuner.candidates(problem, names, facts, choice.facts_for_bands(space))


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
