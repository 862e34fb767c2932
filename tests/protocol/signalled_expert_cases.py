"""The calls of virtual ranks with `signalled` experts: `ExpertCase` by plain all-to-alls of bands.

All-to-alls are work of the copy stream, which stands for the communication stream too. The host
asks for all counts as processes do: it waits for its streams, then for the other hosts.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from expert_cases import ExpertCase, Host
from torch import Tensor
from virtual_hosts import WrongResult
from virtual_machine import Machine, PackageCopy
from virtual_ranks import Schedule, Scheduler


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


class SignalledHost(Host):
    """The same calls by `expert_parallel/signalled.py`."""

    def __init__(self, *about: object) -> None:
        super().__init__(*about)
        self.strategy = strategy_of(self.machine.package)
        tile = self.plan.tile
        self.plan = self.machine.package.problem.Plan(
            "signalled", tile=tile, bands=self.case.bands, comm_sms=4
        )


def strategy_of(package: PackageCopy) -> ModuleType:
    return importlib.import_module(f"{package.experts.__package__}.signalled")


@dataclass(frozen=True)
class BandCase(ExpertCase):
    bands: int = 2

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        with _in_bands(package):
            return super().run(package, schedule)


@contextmanager
def _in_bands(package: PackageCopy) -> Iterator[None]:
    """Calls of `Host` go to the strategy, and its all-to-alls and counts to the virtual ranks."""
    strategy = strategy_of(package)
    run, alls = Machine.run, []

    def run_with(machine: Machine, *about: object) -> Scheduler:
        alls.append(AllToAlls(machine))
        return run(machine, *about)

    # without the signature of a method
    virtual = {
        "exchange": lambda *given: alls[-1].exchange(*given),
        "all_counts": lambda *given: alls[-1].all_counts(*given),
    }
    with (
        mock.patch.multiple(strategy, **virtual),
        mock.patch("expert_cases.Host", SignalledHost),
        mock.patch.object(Machine, "run", run_with),
    ):
        yield
