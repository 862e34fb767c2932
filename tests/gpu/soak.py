"""Many calls of random kinds back to back, with random late ranks; every result must be exact.

    torchrun --nproc-per-node 4 tests/gpu/soak.py --calls 100000
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/soak.py --calls 40 --kinds 8

All strategies that the machine has, all pieces of forward and backward, eager and, on GPUs, as
replays of CUDA graphs. Results are compared on the device where they are made; the host looks every
`BLOCK` calls, so nothing separates the calls in between. Prints one JSON row; exit code 1 if any
result was wrong.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "60")
os.environ.setdefault("FLUX_MEGATRON_POISON", "1")  # what was read too early is NaN
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.append(str(Path(__file__).parents[1]))  # for `closeness`

import torch
import torch.distributed as dist
from soak_kinds import Kind, Operands, kinds
from torch.distributed import ProcessGroup

import flux_megatron
from flux_megatron.tune_command.measure import joined
from flux_megatron.tuning import environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 500  # calls between two looks of the host
LATE = 0.1  # share of the calls to which a rank is late
LATEST_S = 0.002


class Soak:
    """The kinds with their operands on this rank, and the count of wrong results of each."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, kinds: list[Kind], seed: int, graphs: float
    ) -> None:
        self._group, self._device = group, device
        self._order = random.Random(seed)  # the same on all ranks
        self._lateness = random.Random(f"{seed} {group.rank()}")
        self._graph_share = graphs if device.type == "cuda" else 0.0
        self.kinds = kinds
        self.wrong = torch.zeros(len(kinds), dtype=torch.int64, device=device)
        self._operands = [Operands(kind, group, device) for kind in kinds]
        for number in range(len(kinds)):  # memory grows here, and kernels are compiled
            self._call(number)
        self._graphs = [self._captured(n) for n in range(len(kinds))] if self._graph_share else []
        self.replays = 0
        self.calls: Counter[str] = Counter()

    def _call(self, number: int) -> None:
        wrong = self.wrong[number]
        for given, expected in self._operands[number].call():
            assert given.shape == expected.shape, f"{self.kinds[number]}: shape {given.shape}"
            wrong += (given != expected).any()  # NaN differs from everything

    def _captured(self, number: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call(number)
        return graph

    def step(self) -> None:
        """One call of a random kind; this rank may be late."""
        number = self._order.randrange(len(self.kinds))
        replay = self._order.random() < self._graph_share
        if self._lateness.random() < LATE:
            self._be_late(self._lateness.uniform(0, LATEST_S))
        plan = self.kinds[number].case.plan
        self.calls[plan.strategy if plan else "chosen"] += 1
        if replay:
            self._graphs[number].replay()
            self.replays += 1
        else:
            self._call(number)

    def _be_late(self, seconds: float) -> None:
        if self._device.type == "cuda" and self._lateness.random() < 0.7:
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles: the stream sleeps, not the host
        else:
            time.sleep(seconds)

    def look(self, started: float) -> tuple[int, float]:
        """Wrong results of all ranks so far, and the seconds of the slowest. Collective."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        flux_megatron.check()
        wrong = self.wrong.sum()
        dist.all_reduce(wrong, group=self._group)
        seconds = torch.tensor(time.monotonic() - started, device=self._device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self._group)
        return int(wrong), float(seconds)


def soak(
    group: ProcessGroup, device: torch.device, *, calls: int, seconds: float = 3600.0,
    seed: int = 0, graphs: float = 0.1, count: int = 64, small: bool = False,
    portable: bool = False,
) -> dict:  # fmt: skip
    """A row of `calls` calls of `count` kinds; of fewer if time is up or a result was wrong."""
    began = time.monotonic()
    drawn = kinds(count, seed, group.size(), device.type, small, portable)
    run = Soak(group, device, drawn, seed, graphs)
    failures, setup_seconds = run.look(began)
    started, made, taken = time.monotonic(), 0, 0.0
    while made < calls and taken < seconds and not failures:
        for _ in range(min(BLOCK, calls - made)):
            run.step()
            made += 1
        failures, taken = run.look(started)
    wrong = [str(kind) for kind, count in zip(run.kinds, run.wrong.tolist(), strict=True) if count]
    where = asdict(environment.of(device))
    return {
        "what": "soak", "ranks": group.size(), "calls": made, "failures": failures,
        "seconds": round(taken, 1), "setup_seconds": round(setup_seconds, 1), "seed": seed,
        "kinds": count, "replays": run.replays, "strategies": dict(run.calls),
        "wrong_here": wrong, "date": time.strftime("%Y-%m-%d"),
        **{name: where[name] for name in ("gpu", "driver", "torch", "triton", "max_connections")},
    }  # fmt: skip


def main(
    calls: int = 100_000, seconds: float = 3600.0, seed: int = 0, graphs: float = 0.1,
    kinds: int = 64, small: bool = False, portable: bool = False,
) -> None:  # fmt: skip
    """Run on the ranks of torchrun. Each kind is called once before the random calls begin."""
    with joined(DEVICE) as (group, device):
        row = soak(
            group, device, calls=calls, seconds=seconds, seed=seed, graphs=graphs,
            count=kinds, small=small, portable=portable,
        )  # fmt: skip
        printed(row)
    if row["failures"]:
        raise SystemExit(1)


def printed(row: dict) -> None:
    """By rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    import typer

    typer.run(main)
