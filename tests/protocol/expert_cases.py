"""What virtual ranks compute in expert parallelism: calls with new rows and new counts each time.

Counts lie in the same tensor for all calls, as x does, so a replay of a graph finds other counts.
Inputs are overwritten as soon as the call allows it.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from virtual_hosts import VirtualCase, VirtualHost, run_hosts
from virtual_machine import Machine, PackageCopy
from virtual_ranks import Schedule, Scheduler

from flux_megatron.lab import reference

N, K, BLOCK, COMM_ROWS = 24, 16, 16, 8


@dataclass(frozen=True)
class ExpertCase(VirtualCase):
    """`host` is "dispatch", "combine" or "both"; a rank has up to `most` rows for an expert."""

    host: str
    world_size: int = 2
    experts: int = 2
    calls: int = 3
    most: int = 20
    layout: str = "nt"
    ctas: int = 3  # of a persistent kernel
    captured: bool = False  # two calls of three are replays of a graph
    tma: bool = False
    slots: int = 64  # of a rank, so that few experts share signals
    hopper: bool = False  # the Hopper kernels, in Gluon
    reverse: bool = False  # the experts' matrices lie in reverse, and apart

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        channels = (package.experts.DISPATCH, package.experts.COMBINE)
        machine = Machine(package, self.world_size, self.ctas, channels)
        with mock.patch.object(package.signals, "MAX_COMM_TILES", self.slots), self.within(machine):
            return run_hosts(Host, self, Operands(self), machine, schedule)

    def within(self, machine: Machine) -> AbstractContextManager:
        """What else is replaced in a run."""
        return nullcontext()

    def strategy(self, package: PackageCopy) -> tuple[Any, Any]:
        """The module that has the operations, and the plan that they are given."""
        module = package.hopper_experts if self.hopper else package.experts
        name = "hopper" if self.hopper else "fused"
        return module, package.problem.Plan(name, COMM_ROWS, self.tile(package))

    def tile(self, package: PackageCopy) -> Any:
        return package.problem.Tile(BLOCK, BLOCK, BLOCK, group_m=2, tma=self.tma)


class Operands:
    """Integers for every call and rank: counts [R, E], x [T, K], z [capacity, K], w."""

    def __init__(self, case: ExpertCase) -> None:
        self.case, self._random = case, random.Random(0)
        made = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=made).float()

        ranks, calls = range(case.world_size), range(case.calls)
        shape = (N, K) if case.layout == "nt" else (K, N)
        self.w = [integers(case.experts, *shape) for _ in ranks]
        self.laid = [self._laid(w) for w in self.w]
        first = self._counts()
        # a graph has the number of rows, but not where they go
        self.counts = [self._shuffled(first) if case.captured else self._counts() for _ in calls]
        received = [torch.stack(counts).sum((0, 2)) for counts in self.counts]
        sent = [counts.sum() for every in self.counts for counts in every]
        self.capacity = int(max(*sent, *(most.max() for most in received))) + 5
        self.x = [[integers(int(n.sum()), K) for n in counts] for counts in self.counts]
        self.z = [[integers(self.capacity, K) for _ in ranks] for _ in calls]

    def _counts(self) -> list[Tensor]:
        """Of all ranks; a third of them 0, and small next to large ones."""
        case = self.case
        groups = case.world_size * case.experts
        numbers = [
            [self._random.choice((0, self._random.randint(1, case.most), case.most))
             for _ in range(groups)] for _ in range(case.world_size)
        ]  # fmt: skip
        shape = (case.world_size, case.world_size, case.experts)
        return list(torch.tensor(numbers, dtype=torch.int32).view(shape))

    def _laid(self, w: Tensor) -> Tensor:
        """As the operations are given it: in reverse with NaN in the rows between experts."""
        if not self.case.reverse:
            return w
        experts, rows, columns = w.shape
        storage = torch.full((experts, rows + 3, columns), float("nan"))
        return storage[:, :rows].copy_(w.flip(0))

    def _shuffled(self, counts: list[Tensor]) -> list[Tensor]:
        made = []
        for one in counts:
            numbers = one.flatten().tolist()
            self._random.shuffle(numbers)
            made.append(torch.tensor(numbers, dtype=torch.int32).view(one.shape))
        return made

    def expected(self, what: str, call: int) -> list[Tensor]:
        counts, layout = self.counts[call], self.case.layout
        if what == "back":
            return reference.gemm_a2a(self.z[call], self.w, counts, layout)
        y, rows = reference.a2a_gemm(self.x[call], self.w, counts, self.capacity, layout)
        if what == "received":
            return [torch.stack([one[r] for one in counts]) for r in range(len(counts))]
        if what == "rows":  # behind those that came lies what earlier calls have left
            came = [int(torch.stack([one[r] for one in counts]).sum()) for r in range(len(counts))]
            return [torch.cat([one[:n], torch.zeros_like(one[n:])])
                    for one, n in zip(rows, came, strict=True)]  # fmt: skip
        return y


class Host(VirtualHost):
    OPERANDS = ("counts", "x", "z")

    def __init__(self, case: ExpertCase, operands: Operands, machine: Machine, rank: int) -> None:
        super().__init__(case, operands, machine, rank)
        self.strategy, self.plan = case.strategy(machine.package)

    def step(self, call: int, counts: Tensor, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        results, keep = {}, call % 2 == 1
        laid, layout = self.operands.laid[self.rank], self.case.layout
        w = self.machine.package.weights.ExpertWeights(laid, self.case.reverse)
        if self.case.host != "combine":
            y, received, rows = self.strategy.a2a_gemm(
                x, w, counts, self.operands.capacity, layout, keep, self.plan, self.space
            )
            results |= {"y": y, "received": received} | ({"rows": rows} if keep else {})
        if self.case.host != "dispatch":
            results["back"] = self.strategy.gemm_a2a(
                z, w, counts, len(x), layout, self.plan, self.space
            )
        return results

    def known(self, what: str, kept: Tensor, call: int) -> Tensor:
        if what == "rows":
            came = int(sum(one[self.rank].sum() for one in self.operands.counts[call]))
            kept[came:].fill_(0)
        return kept
