"""Embedding + All-to-All on virtual ranks: back-to-back calls, each with new weights."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from virtual_hosts import VirtualHost, run_hosts
from virtual_machine import Machine, PackageCopy
from virtual_ranks import Schedule, Scheduler

from flux_megatron.lab import reference

ROWS, D, LONGEST = 5, 3, 3


@dataclass(frozen=True)
class BagsCase:
    """`tables` of each rank, and `samples` and a slice of them; `steps` of each call."""

    steps: tuple[str, ...] = ("forward", "backward")
    tables: tuple[int, ...] = (2, 1)
    samples: int = 5
    slice_samples: int = 2
    block: int = 2  # bags of a tile
    calls: int = 3
    captured: bool = False  # two calls of three are replays of a graph
    ctas: int = 3

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        machine = Machine(package, len(self.tables), self.ctas, (package.fused_bags.CHANNEL,))
        tile = package.problem.Tile(self.block, 4, num_warps=4)
        with mock.patch.object(package.fused_bags.pooling, "tile_of", return_value=tile):
            return run_hosts(Host, self, Operands(self), machine, schedule)


class Operands:
    """Integers: weight [T_local, ROWS, D] and dy [B / R, T, D] of each call and rank; the bags."""

    def __init__(self, case: BagsCase) -> None:
        random = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=random).float()

        batch = case.samples * len(case.tables)
        self.offsets, self.indices = [], []
        for local in case.tables:
            lengths = torch.randint(LONGEST + 1, (local * batch,), generator=random)
            self.offsets.append(F.pad(lengths.cumsum(0), (1, 0)))
            self.indices.append(torch.randint(ROWS, (int(lengths.sum()),), generator=random))
        calls = range(case.calls)
        self.weight = [[integers(n, ROWS, D) for n in case.tables] for _ in calls]
        all_tables = sum(case.tables)
        self.dy = [[integers(case.samples, all_tables, D) for _ in case.tables] for _ in calls]

    def expected(self, step: str, call: int) -> list[Tensor]:
        weights = [w.clone().requires_grad_() for w in self.weight[call]]
        y = reference.embedding_all_to_all(weights, self.indices, self.offsets)
        torch.autograd.backward(y, self.dy[call])
        return [one.detach() for one in y] if step == "forward" else [w.grad for w in weights]


class Host(VirtualHost):
    OPERANDS = ("weight", "dy")

    def __init__(self, case: BagsCase, operands: Operands, machine: Machine, rank: int) -> None:
        super().__init__(case, operands, machine, rank)
        self.bags = machine.package.bags.Bags(
            case.tables, rank, ROWS, D, case.samples * len(case.tables), "sum", torch.float32
        )

    def step(self, call: int, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
        fused, space = self.machine.package.fused_bags, self.space
        bags = self.operands.indices[self.rank], self.operands.offsets[self.rank], self.bags
        slices, results = self.case.slice_samples, {}
        if "forward" in self.case.steps:
            results["forward"] = fused.forward(weight, *bags, space, slices)
        if "backward" in self.case.steps:
            results["backward"] = fused.backward(dy, *bags, space, slices, 2)
            dy.fill_(float("nan"))
        return results
