"""The calls of virtual ranks with `signalled` experts: `ExpertCase` by plain all-to-alls of bands.

All-to-alls are work of the copy stream, which stands for the communication stream too. The host
asks for all counts as processes do: it waits for its streams, then for the other hosts.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from expert_cases import ExpertCase
from torch import Tensor
from virtual_hosts import WrongResult
from virtual_machine import Machine, PackageCopy


class AllToAlls:
    """Of one group; and the counts that hosts ask for: the n-th time all of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._asked: Counter[int] = Counter()  # by rank
        self._counts: dict[tuple[int, int], Tensor] = {}  # by number and rank

    def exchange(
        self, group: object, received: list[Tensor], sent: list[Tensor], space: object
    ) -> None:
        rank = self._machine.scheduler.rank

        def take(brought: list[list[Tensor]]) -> Callable[[], object]:
            mine = [pieces[rank].clone() for pieces in brought]
            for r, (piece, target) in enumerate(zip(mine, received, strict=True)):
                if piece.shape != target.shape:
                    said = f"rank {r} sends {piece.shape}, {target.shape} expected"
                    raise WrongResult(said)
            return lambda: [target.copy_(one) for target, one in zip(received, mine, strict=True)]

        self._machine.collectives.enqueue("all-to-all", sent, take)

    def all_counts(self, counts: Tensor, rows: int, capacity: int, space: object) -> Tensor:
        rank, machine = self._machine.scheduler.rank, self._machine
        number = self._asked[rank]
        self._asked[rank] += 1
        machine.scheduler.synchronize()
        self._counts[number, rank] = counts.clone()
        machine._barrier(rank)
        return torch.stack([self._counts[number, r] for r in range(machine.world_size)])


@dataclass(frozen=True)
class BandCase(ExpertCase):
    """By `expert_parallel/signalled.py`, with all-to-alls and counts of virtual ranks."""

    bands: int = 2

    def within(self, machine: Machine) -> AbstractContextManager:
        alls, (module, _) = AllToAlls(machine), self.strategy(machine.package)
        return mock.patch.multiple(module, exchange=alls.exchange, all_counts=alls.all_counts)

    def strategy(self, package: PackageCopy) -> tuple[Any, Any]:
        module = importlib.import_module(f"{package.experts.__package__}.signalled")
        tile = self.tile(package)
        plan = package.problem.Plan("signalled", tile=tile, bands=self.bands, comm_sms=4)
        return module, plan
