"""Do calls end, and how soon, while another kernel holds SMs? Every strategy, forward and backward.

    torchrun --nproc-per-node 4 -m flux_megatron.lab.measure.hold hold.jsonl
    torchrun --nproc-per-node 4 -m flux_megatron.lab.measure.hold hold.jsonl \
        --old path/to/another/checkout

A kernel that only spins (`held_sms.py`) holds k SMs of rank 0 or of every rank. It is launched
first, and let go when the call has ended or after `--hold-ms`: a call that needs those SMs outlasts
it. Every plan is verified before it is timed. A round runs every strategy once under one hold, and
its time of `sequential` (cuBLAS and NCCL) is what the others are compared with.

With `--old` the kernels of another version take part in the same rounds. Without a hold there are
more rounds, and `to_old` is the median of a round's ratio of new to old.

Prints a line a strategy: us, x `sequential`; `!` where a call outlasted the hold.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.tuning import timing

SHAPES = "8192x12288x12288,2048x12288x12288,8192x12288x3072"
PIECES = "ag_gemm,gemm_rs,row backward,column backward"


@dataclass(frozen=True)
class Held:
    """How many SMs are held, and on which ranks."""

    count: int = 0
    on: str = "none"

    def here(self, rank: int) -> bool:
        return self.on == "all" or (self.on == "rank0" and rank == 0)


@dataclass(frozen=True)
class Entrant:
    version: str
    strategy: str
    plan: str
    call: Callable[[], object]

    @property
    def name(self) -> str:
        return self.strategy if self.version == "new" else f"{self.strategy}, old"


@contextmanager
def other_version(checkout: Path, package: str = "flux_megatron_old") -> Iterator[str]:
    """The package of another checkout, importable under another name."""
    sources = checkout / "flux_megatron"
    files = [*sources.rglob("*.py")]
    if not files:
        raise ValueError(f"{sources} has no Python files, a checkout of flux_megatron expected")
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            copy = Path(folder, package, path.relative_to(sources))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text().replace("flux_megatron", package))
        sys.path.insert(0, folder)
        yield package
        sys.path.remove(folder)


def problem_of(package: str, piece: str, shape: tuple[int, int, int], run: Run) -> Any:
    """`shape` is M x N x K of the layer's local GEMM in forward, all M rows gathered."""
    M, N, K = shape
    R = run.group.size()
    problem = importlib.import_module(f"{package}.problem")
    gathers, scatters = problem.Pattern.AG_GEMM, problem.Pattern.GEMM_RS
    pattern, N, K, layout = {
        "ag_gemm": (gathers, N * R, K, "nt"),
        "gemm_rs": (scatters, N, K * R, "nt"),
        "row backward": (gathers, K * R, N, "nn"),
        "column backward": (scatters, K, N * R, "nn"),
    }[piece]
    return problem.Problem(pattern, M, N, K, "bfloat16", R, layout, run.device.type)


def entrants(
    run: Run, version: str, package: str, piece: str, shape: tuple[int, int, int]
) -> Iterator[Entrant]:
    """The strategies of a version that can run the problem and give what `sequential` does."""
    registry = importlib.import_module(f"{package}.overlap.registry")
    room = "tuning" if importlib.util.find_spec(f"{package}.tuning") else "overlap"  # of older ones
    trials = importlib.import_module(f"{package}.{room}.trial")
    problem = problem_of(package, piece, shape, run)
    trial = trials.Trial(problem, run.group, run.device)
    trial.begin()
    for name, strategy in registry.STRATEGIES[problem.pattern].items():
        if version == "old" and name == "sequential":
            continue
        if reason := strategy.supports(problem):
            run.say(f"{version} {name}: {reason}")
            continue
        plan = strategy.default_plan(problem)
        if failure := run.failure(trial.verified(plan)):
            run.say(f"FAILED {piece} {shape} {version} {name}: {failure}")
            run.row("hold", **_what(piece, shape, version, name, plan.dumps()), failure=failure)
            trial.renew()
            continue
        yield Entrant(version, name, plan.dumps(), trial.call(plan))


def _what(
    piece: str, shape: tuple[int, int, int], version: str, strategy: str, plan: str
) -> dict[str, object]:
    pattern = {"row backward": "ag_gemm", "column backward": "gemm_rs"}.get(piece, piece)
    M, N, K = shape
    return {
        "piece": piece, "pattern": pattern, "M": M, "N": N, "K": K, "version": version,
        "strategy": strategy, "plan": plan,
    }  # fmt: skip


def timed(
    calls: Sequence[Callable[[], object]], held: Held, run: Run, hold_ms: float, rounds: int
) -> tuple[list[list[float]], list[list[bool]]]:
    """Of every call in every round: us on the slowest rank, and whether the hold outlasted it."""
    spinner = None
    if held.here(run.group.rank()) and run.device.type == "cuda":
        from flux_megatron.lab.measure.held_sms import HeldSms

        spinner = HeldSms(held.count, hold_ms, run.device)
    token = torch.zeros(1, device=run.device)
    measured = torch.zeros(2, len(calls), rounds)
    for number in range(rounds):
        for place, call in enumerate(calls):
            measured[:, place, number] = torch.tensor(_once(call, spinner, run, token))
    times_us, outlasted = run.slowest(measured).tolist()
    return times_us, [[not found for found in one] for one in outlasted]


def _once(
    call: Callable[[], object], spinner: Any, run: Run, token: torch.Tensor
) -> tuple[float, float]:
    """us of one call that starts on all ranks together, and 1.0 if it outlasted the hold."""
    if run.device.type == "cpu":
        dist.barrier(group=run.group)
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6, 0.0
    torch.cuda.synchronize(run.device)
    time.sleep(timing.GAP_S)
    if spinner is not None:
        spinner.begin()
    torch.cuda._sleep(timing.HIDE_LAUNCH)
    dist.all_reduce(token, group=run.group)
    torch.cuda._sleep(timing.AFTER_ALIGNMENT)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    if spinner is not None:
        spinner.end()
    torch.cuda.synchronize(run.device)
    outlasted = spinner is not None and not spinner.was_asked_to_end()
    return start.elapsed_time(end) * 1e3, float(outlasted)


def _ratio(times_us: Sequence[float], against_us: Sequence[float]) -> float:
    """The median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(times_us, against_us, strict=True)), 4)


def rows_of(
    run: Run, piece: str, shape: tuple[int, int, int], held: Held, racing: Sequence[Entrant],
    hold_ms: float, rounds: int,
) -> Iterator[tuple[str, dict]]:  # fmt: skip
    """A row a strategy under one hold, by the name of the strategy."""
    times, finished = timed([one.call for one in racing], held, run, hold_ms, rounds)
    by_name = dict(zip([one.name for one in racing], times, strict=True))
    for one, times_us, kept in zip(racing, times, finished, strict=True):
        older = by_name.get(f"{one.strategy}, old") if one.version == "new" else None
        yield one.name, run.row(
            "hold", **_what(piece, shape, one.version, one.strategy, one.plan),
            held_sms=held.count, held_on=held.on, us=round(statistics.median(times_us), 1),
            to_sequential=_ratio(times_us, by_name["sequential"]),
            to_old=_ratio(times_us, older) if older else None,
            hold_ms=hold_ms, finished_while_held=all(kept) if held.count else None,
            times_us=[round(us, 1) for us in times_us],
        )  # fmt: skip


def _cell(row: dict) -> str:
    mark = "!" if row["finished_while_held"] is False else " "
    return f"{row['us']:7.0f} {row['to_sequential']:5.2f}{mark}"


def measure(
    run: Run, versions: dict[str, str], shapes: Sequence[tuple[int, int, int]],
    pieces: Sequence[str], holds: Sequence[Held], hold_ms: float, rounds: int, held_rounds: int,
) -> None:  # fmt: skip
    """The table, problem by problem. `versions` has packages by "new" and "old"."""
    for shape in shapes:
        for piece in pieces:
            racing = [
                entrant for version, package in versions.items()
                for entrant in entrants(run, version, package, piece, shape)
            ]  # fmt: skip
            lines: dict[str, list[dict]] = {one.name: [] for one in racing}
            for held in holds:
                if not run.time_left():
                    run.say("no time for the others")
                    return
                turns = held_rounds if held.count else rounds
                for name, row in rows_of(run, piece, shape, held, racing, hold_ms, turns):
                    lines[name].append(row)
            heads = "".join(f"{held.on + ' ' + str(held.count):>14}" for held in holds)
            run.say(f"{piece + ' ' + 'x'.join(map(str, shape)):32}{heads}")
            for name, rows in lines.items():
                newer = next((f"  new/old {row['to_old']}" for row in rows if row["to_old"]), "")
                run.say(f"  {name:30}{''.join(map(_cell, rows))}{newer}")


def main(
    out: Path, old: Path | None = None, commit: str = "", shapes: str = SHAPES,
    pieces: str = PIECES, sms: str = "1,8,32,100", hold_ms: float = 60, rounds: int = 24,
    held_rounds: int = 6, seconds: float = 540,
) -> None:  # fmt: skip
    """Run on the ranks of torchrun. `shapes` are local M x N x K of layers."""
    run = gpu_run.start(out, commit, seconds)
    counts = [int(count) for count in sms.split(",")]
    holds = [Held(), *(Held(count, on) for on in ("all", "rank0") for count in counts)]
    sizes: Any = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]

    with other_version(old) if old else nullcontext() as package:
        versions = {"new": "flux_megatron"} | ({"old": package} if package else {})
        measure(run, versions, sizes, pieces.split(","), holds, hold_ms, rounds, held_rounds)
    gpu_run.finish(run)


if __name__ == "__main__":
    import typer

    typer.run(main)
