"""Which version makes the faster code, of this package or of Triton? The same calls with several,
in one race.

    git worktree add ../before COMMIT
    python -m flux_megatron.lab.measure.trees rows.jsonl --tree now=. --tree before=../before
    python -m flux_megatron.lab.measure.trees rows.jsonl --tree installed \
        --tree 3.9=PATH/OF/ITS/FOLDER
    python -m flux_megatron.lab.measure.trees rows.jsonl --tree 1=. \
        --tree 0=.,FLUX_MEGATRON_NATIVE=0
    TRITON_INTERPRET=1 python -m flux_megatron.lab.measure.trees rows.jsonl --tree now=. \
        --tree before=../before --device cpu --shapes "64x64x64 nt" --rounds 2

A tree is a folder for PYTHONPATH: another checkout, or another `triton`, as
`pip install --no-deps --target` makes it; `installed` is this checkout and the machine's Triton.
Variables of its environment may follow the folder.
Each tree gets processes of its own, one a GPU, which take turns: in a round every tree makes
`--calls` calls of a case, one tree after the other, the first one in turn. Before that each case is
verified on small integers, every bit; timed are random numbers.

Cases: torch's library GEMM, which no tree changes; our GEMM alone; and AG+GEMM, GEMM+RS and GEMM+AR
of each strategy of our kernels and of `auto`, what an unmeasured call gets in each tree. A row a
case and tree: us, the slowest rank, median over rounds; `to_first` is the median of a round's ratio
to the first tree. `--only "auto,gemm_ar low_latency"` leaves the others out. Ends after
`--seconds`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron.lab.bench.provenance import WITHOUT_MULTICAST
from flux_megatron.lab.bench.table_run import append

CHECKOUT = Path(__file__).parents[3]
SHAPES = "8192x14336x8192 nt,2048x14336x8192 nt,8192x14336x8192 nn,2048x14336x8192 nn"


@dataclass
class Tree:
    """The ranks of one tree; each reads a case a line and answers with its time."""

    name: str
    ranks: list[Any]  # of Popen, with pipes
    variables: tuple[str, ...] = ()  # names of what its environment has besides

    def ask(self, case: str) -> list[dict]:
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # it has ended: `_answer` says so
                rank.stdin.write(case + "\n")
                rank.stdin.flush()
        return [self._answer(rank) for rank in self.ranks]

    def _answer(self, rank: Any) -> dict:
        for line in rank.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.name}: a rank ended with status {rank.wait()}")


def free_ports(count: int) -> list[str]:
    """So many, all held at a time: one after another two could be the same."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


def start(tree: str, ranks: int, commit: str, calls: int, port: str) -> Tree:
    """Of NAME=FOLDER,VARIABLE=VALUE,..."""
    name, _, rest = tree.partition("=")
    folder, *words = rest.split(",")
    variables = dict(word.split("=", 1) for word in words)
    path = [folder, str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks),
        **WITHOUT_MULTICAST, **variables,
    }  # fmt: skip
    workers = (
        path / f"{__package__.replace('.', '/')}/trees_rank.py" for path in (Path(folder), CHECKOUT)
    )
    worker = next(one for one in workers if one.exists())  # its own, which knows its modules
    command = [sys.executable, str(worker), commit, str(calls), folder]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return Tree(name, started, tuple(variables))


def race(trees: list[Tree], case: str, rounds: int, end_s: float) -> dict[str, list[float]]:
    """The us of each round, by tree."""
    times: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for number in range(rounds):
        if time.monotonic() > end_s:
            break
        first = number % len(trees)
        for tree in trees[first:] + trees[:first]:
            times[tree.name].append(max(answer["us"] for answer in tree.ask(f"time {case}")))
    return times


def rows_of(case: str, times: dict[str, list[float]], about: dict[str, dict]) -> Iterator[dict]:
    reference = next(iter(times.values()))
    for name, us in times.items():
        ratio = statistics.median(a / b for a, b in zip(us, reference, strict=True))
        yield {
            "table": "trees", "case": case, "tree": name, "us": round(statistics.median(us), 1),
            "times_us": [round(one, 1) for one in us], "to_first": round(ratio, 4), **about[name],
        }  # fmt: skip


def measure(trees: list[Tree], out: Path, shapes: str, only: str, rounds: int, end_s: float) -> int:
    """How many cases were wrong in some tree."""
    about = {tree.name: tree.ask(" ".join(("about", *tree.variables)))[0] for tree in trees}
    print({name: one["triton"] for name, one in about.items()}, flush=True)
    wrong = 0
    for shape in shapes.split(","):
        of_each = [tree.ask(f"cases {shape}")[0]["cases"] for tree in trees]
        cases = [
            case for case in of_each[0]
            if all(case in others for others in of_each)
            and any(words in case for words in only.split(","))
        ]  # fmt: skip
        failed = {
            case: [tree.name for tree in trees
                   if not all(answer["exact"] for answer in tree.ask(f"check {case}"))]
            for case in cases
        }  # fmt: skip
        for tree in trees:
            tree.ask("renew")
        for case, names in failed.items():
            if names:
                print(f"{case}: WRONG in {', '.join(names)}", flush=True)
                wrong += 1
                continue
            if time.monotonic() > end_s:
                print("no time for the others", flush=True)
                return wrong
            rows = [*rows_of(case, race(trees, case, rounds, end_s), about)]
            shown = (f"{row['tree']} {row['us']:8.1f} us {row['to_first']:6.3f}" for row in rows)
            print(f"{case:44}", *shown, sep="  ", flush=True)
            append(out, rows)
    return wrong


def main(
    out: Path, tree: Annotated[list[str], typer.Option(metavar="NAME=FOLDER[,VARIABLE=VALUE]")],
    device: str = "cuda", shapes: str = SHAPES, only: str = "", ranks: int = 2, rounds: int = 20,
    calls: int = 10, commit: str = "", seconds: float = 90,
) -> None:  # fmt: skip
    """`shapes` are local M x N x K, and layout of w; `only` are words of cases' names; a round has
    `calls` of one case and tree.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end_s = time.monotonic() + seconds
    ports = free_ports(len(tree))
    trees = [start(one, ranks, commit, calls, port) for one, port in zip(tree, ports, strict=True)]
    try:
        wrong = measure(trees, out, shapes, only, rounds, end_s)
    finally:
        for rank in (rank for one in trees for rank in one.ranks):
            rank.kill()
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
