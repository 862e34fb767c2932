"""Calls and all-reduces of another communicator, launched in orders that differ between the ranks.

    torchrun --nproc-per-node 4 tests/gpu/race_orders.py race.jsonl
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/race_orders.py race.jsonl \
        --calls 60 --kinds 6 --megabytes 1

The calls are the soak's, forward and backward pieces of every strategy, eager and as replays of
CUDA graphs, and some of the sizes of a training run. Beside every `--every`th of them an NCCL
all-reduce of `--megabytes` runs on a second communicator and stream. Half of them rank 0 launches
before the call and rank 1 after it; for the others each rank draws how many calls later it does.
No order may hang, and every result must be exact.

Where no call has ended for `--stall-s` the process ends by name, with exit code 3 and a row that
counts the hang. Exit code 1: a wrong result.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "60")  # a hang is seen before it gives way
os.environ.setdefault("FLUX_MEGATRON_POISON", "1")

import gpu_run
import torch
import torch.distributed as dist
from gpu_run import Run
from soak import Soak
from soak_kinds import Kind, kinds

from flux_megatron.overlap import registry

STEP = 25  # calls between two marks of progress; at most two steps are in flight
BLOCK = 500  # calls between two looks at the results
LATEST = 3  # calls by which a rank may launch an all-reduce later than another
SIZES = {"cuda": (2048, 4096, 4096), "cpu": (32, 16, 16)}  # M x N x K of a layer, local
LAYOUTS = {"ag_gemm": "nt", "gemm_rs": "nt", "row backward": "nn", "column backward": "nn"}


class Stall(Exception):
    """No call has ended for too long."""


class Watchdog:
    """Calls `stalled` with the number of calls that have ended, if `progress` fails to come."""

    def __init__(self, limit_s: float, stalled: Callable[[int], None]) -> None:
        self._limit_s, self._stalled = limit_s, stalled
        self._ended, self._came, self._over = 0, threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def progress(self, ended: int) -> None:
        self._ended = ended
        self._came.set()

    def stop(self) -> None:
        self._over = True
        self._came.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._came.wait(self._limit_s):
            self._came.clear()
            if self._over:
                return
        self._stalled(self._ended)


def training_kinds(first: int, world_size: int, device: str) -> Iterator[Kind]:
    """Every piece of a layer by every strategy that can run it, in its default plan."""
    M, N, K = SIZES[device]
    for piece, layout in LAYOUTS.items():
        bare = Kind(first, piece, M // world_size, N, K, torch.bfloat16, layout, False, None)
        problem = bare.problem(world_size, device)
        for strategy in registry.STRATEGIES[problem.pattern].values():
            if strategy.supports(problem) is None:
                plan = strategy.default_plan(problem)
                yield Kind(first, piece, bare.M_shard, N, K, bare.dtype, layout, False, plan)
                first += 1


class Race(Soak):
    """The soak beside all-reduces. A rank launches number i when it has made `_place(i)` calls."""

    def __init__(
        self, run: Run, kinds: list[Kind], seed: int, graphs: float, every: int, size_bytes: int
    ) -> None:
        super().__init__(run.group, run.device, kinds, seed, graphs)
        assert every > LATEST, f"every {every} given, more than {LATEST} expected: they keep order"
        rank, self._every, self._device = run.group.rank(), every, run.device
        self._rank, self._draw = rank, random.Random(f"{seed} {rank} all-reduce")
        self._other = dist.new_group(range(run.group.size()))
        self._side = torch.cuda.Stream() if run.device.type == "cuda" else None
        self._large = torch.full((size_bytes // 4,), float(rank), device=run.device)
        self._works: list[dist.Work] = []
        self.made, self.launched = 0, 0
        self._next = self._place(0)
        self._all_reduce()  # communicators connect at their first
        self.all_reduce_ms = self._alone_ms()

    def _place(self, number: int) -> int:
        later = self._rank % 2 if number % 2 == 0 else self._draw.randint(0, LATEST)
        return self._every * (number + 1) + later

    def _all_reduce(self) -> None:
        with torch.cuda.stream(self._side):  # None: no stream is set
            work = dist.all_reduce(self._large, dist.ReduceOp.MAX, self._other, async_op=True)
        self._works.append(work)

    def _alone_ms(self) -> float:
        self.wait()
        begin = time.perf_counter()
        self._all_reduce()
        self.wait()
        return 1e3 * (time.perf_counter() - begin)

    def wait(self) -> None:
        """For all all-reduces that have been launched."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._side is not None:
            torch.cuda.synchronize(self._device)

    def _launch_next(self) -> None:
        self._all_reduce()
        self.launched += 1
        self._next = self._place(self.launched)

    def step(self) -> None:
        while self._next <= self.made:
            self._launch_next()
        super().step()
        self.made += 1

    def catch_up(self) -> None:
        """Launch what other ranks may have launched already: then every rank can wait."""
        while self._every * (self.launched + 1) < self.made:
            self._launch_next()

    def look(self, started: float) -> tuple[int, float]:
        self.catch_up()
        self.wait()
        largest = float(len(dist.get_process_group_ranks(self._other)) - 1)
        assert self._large[0] == self._large[-1] == largest, "an all-reduce went wrong"
        return super().look(started)


def race(
    run: Run, *, calls: int, count: int, seed: int, graphs: float, every: int, megabytes: int,
    stall_s: float, small: bool = False,
) -> dict:  # fmt: skip
    """The row of `calls` calls, or of fewer if the time is up or a result is wrong."""
    size, device = run.group.size(), run.device.type
    drawn = kinds(count, seed, size, device, small, portable=False)
    drawn += training_kinds(count, size, device)
    about = {"every": every, "all_reduce_mb": megabytes, "seed": seed, "kinds": len(drawn),
             "stall_s": stall_s}  # fmt: skip
    one = Race(run, drawn, seed, graphs, every, megabytes << 20)

    def stalled(ended: int) -> None:
        error = f"{Stall.__name__}: rank {run.group.rank()}: no call has ended for {stall_s:g} s"
        error += f"; {ended} of the {one.made} that were made have"
        print(error, file=sys.stderr, flush=True)
        run.row("race", **about, calls=ended, hangs=1, error=error)
        time.sleep(3)  # the other ranks have as much to say
        os._exit(3)

    watchdog = Watchdog(stall_s, stalled)
    wrong, _ = one.look(time.monotonic())
    started, taken = time.monotonic(), 0.0
    watchdog.progress(0)
    while one.made < calls and not wrong and run.time_left():
        _block(one, min(BLOCK, calls - one.made), watchdog)
        wrong, taken = one.look(started)
        watchdog.progress(one.made)
    watchdog.stop()
    return run.row(
        "race", **about, calls=one.made, hangs=0, wrong=wrong, replays=one.replays,
        all_reduces=one.launched, all_reduce_ms=round(one.all_reduce_ms, 2),
        seconds=round(taken, 1), strategies=dict(one.calls),
    )  # fmt: skip


def _block(one: Race, calls: int, watchdog: Watchdog) -> None:
    """Calls, a step ahead of those that have ended: a full launch queue would stop the host."""
    marks: list[tuple[int, torch.cuda.Event]] = []
    for number in range(calls):
        one.step()
        if number % STEP or one._device.type == "cpu":
            continue
        mark = torch.cuda.Event()
        mark.record()
        marks.append((one.made, mark))
        if len(marks) > 1:
            made, mark = marks.pop(0)
            mark.synchronize()
            watchdog.progress(made)


def main(
    out: Path, commit: str = "", calls: int = 10_000, kinds: int = 48, seed: int = 0,
    graphs: float = 0.3, every: int = 8, megabytes: int = 512, stall_s: float = 30,
    seconds: float = 150,
) -> None:  # fmt: skip
    """Run on the ranks of torchrun."""
    run = gpu_run.start(out, commit, seconds)
    row = race(
        run, calls=calls, count=kinds, seed=seed, graphs=graphs, every=every, megabytes=megabytes,
        stall_s=stall_s,
    )  # fmt: skip
    shown = ("calls", "hangs", "wrong", "replays", "all_reduces", "all_reduce_ms", "seconds")
    run.say(f"race {run.group.size()} ranks: { {name: row[name] for name in shown} }")
    run.say(f"  {row['strategies']}")
    gpu_run.finish(run, code=1 if row["wrong"] else 0)


if __name__ == "__main__":
    import typer

    typer.run(main)
