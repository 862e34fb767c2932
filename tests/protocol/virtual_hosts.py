"""What one rank of a case does on virtual ranks, whatever it calls: back-to-back calls that bring
new data in the same tensors, and the comparison of all results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from virtual_machine import Machine, Replays
from virtual_ranks import Schedule, Scheduler


class WrongResult(AssertionError):
    """A rank's result differs from the reference."""


class VirtualCase:
    """A dataclass, whose first field is `host`."""

    def __str__(self) -> str:
        """What it is of, and what differs from the defaults."""
        first, *others = ((one, getattr(self, one.name)) for one in fields(self))
        return " ".join([str(first[1]), *(f"{one.name}={value}" for one, value in others
                                          if value != one.default)])  # fmt: skip


class VirtualHost:
    """The calls of one rank. `results` maps (what, call) to a tensor. `operands` has, by the names
    of `OPERANDS`, a tensor for each call and rank.
    """

    OPERANDS: tuple[str, ...]

    def __init__(self, case: Any, operands: Any, machine: Machine, rank: int) -> None:
        self.case, self.operands, self.machine, self.rank = case, operands, machine, rank
        self.space = machine.workspaces[rank]
        self.results: dict[tuple[str, int], Tensor] = {}
        self._inputs: dict[tuple[str, str], Tensor] = {}

    def run(self) -> None:
        replays = Replays(self.machine, self.case.captured)
        for call in range(self.case.calls):
            given = self.begin(call)
            for what, result in replays(call, partial(self.step, call, *given)).items():
                kept = torch.empty_like(result).copy_(result)
                self.results[what, call] = self.known(what, kept, call)
            for one in given:
                one.fill_(float("nan") if one.is_floating_point() else 1)

    def begin(self, call: int) -> list[Tensor]:
        """What the call is given."""
        return [
            self.input(name, getattr(self.operands, name)[call][self.rank])
            for name in self.OPERANDS
        ]

    def step(self, call: int, *given: Tensor) -> dict[str, Tensor]:
        """The results of one call. What it was given is overwritten then, or by itself sooner."""
        raise NotImplementedError

    def known(self, what: str, kept: Tensor, call: int) -> Tensor:
        """Of a result what the call has written."""
        return kept

    def input(self, name: str, new: Tensor) -> Tensor:
        """This call's data, in the memory of the stream's last call's if that has the same size."""
        key = name, self.machine.scheduler.current_stream
        if key not in self._inputs or self._inputs[key].shape != new.shape:
            self._inputs[key] = torch.empty_like(new)
        return self._inputs[key].copy_(new)


def run_hosts(
    kind: Callable[..., VirtualHost], case: Any, operands: Any, machine: Machine, schedule: Schedule
) -> Scheduler:
    """`Deadlock`, `OutOfBounds` or `WrongResult` unless every rank has what `operands` expect."""
    hosts = [kind(case, operands, machine, rank) for rank in range(machine.world_size)]
    scheduler = machine.run(schedule, lambda rank: hosts[rank].run())
    _assert_right(hosts, operands)
    return scheduler


def _assert_right(hosts: Iterable[VirtualHost], operands: Any) -> None:
    for host in hosts:
        for (what, call), result in host.results.items():
            right = operands.expected(what, call)[host.rank]
            differ = result.float() != right.float()
            if result.dtype != right.dtype or differ.any():
                where = f"{what} of call {call} on rank {host.rank}"
                wrong = f"{int(differ.sum())} of {right.numel()} elements are wrong"
                raise WrongResult(f"{where}: {wrong}")
