"""Own kernels on virtual ranks: that of scripts/own_kernel.py, and one with a rank barrier."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from own_kernel_cases import EPS, SCRIPTS, exact_shard, exact_weight, expected
from protocol_cases import assert_right
from torch import Tensor
from virtual_machine import Machine, PackageCopy, Replays
from virtual_ranks import Schedule, Scheduler

KERNELS = {
    "norm": SCRIPTS / "own_kernel.py",
    "barrier": Path(__file__).parent / "barrier_kernel.py",
}
N = 12
SLOTS = 2  # so that some tiles share a signal


@dataclass(frozen=True)
class OwnCase:
    kernel: str = "norm"
    world_size: int = 2
    M_shard: int = 5  # rows of a tile: 2
    calls: int = 4
    captured: bool = False  # two calls of three are replays of a graph
    ctas: int = 3
    last_epoch: int = 0  # of the calls before

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        return run(self, package, schedule)


def loaded(kernel: str, package: PackageCopy, folder: Path) -> ModuleType:
    """The file of a kernel, or its mutant, as a module that uses this copy of the package."""
    source = KERNELS[kernel].read_text()
    if package.mutation is not None:
        assert package.mutation.path == KERNELS[kernel].name
        source = package.mutation.apply(source)
    source = source.replace("flux_megatron.device import", "flux_megatron.device.host import")
    file = folder / f"flux_megatron_{kernel}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Host:
    """One rank's host program. `results` maps (kernel, call) to a tensor."""

    def __init__(self, case: OwnCase, module: ModuleType, machine: Machine, rank: int) -> None:
        self.case, self.module, self.machine, self.rank = case, module, machine, rank
        group = machine.workspaces[rank].group
        self.channel = module.Channel(case.kernel, group, torch.device("cpu"))
        self.x = torch.empty_like(operand(case, 0, rank))
        self.weight = exact_weight(N, torch.float32)
        self.results: dict[tuple[str, int], Tensor] = {}

    def run(self) -> None:
        replays = Replays(self.machine, self.case.captured)
        for call in range(self.case.calls):
            self.x.copy_(operand(self.case, call, self.rank))
            y = replays(call, self._call)
            self.results[self.case.kernel, call] = torch.empty_like(y).copy_(y)

    def _call(self) -> Tensor:
        if self.case.kernel == "barrier":
            return self.module.all_to_all(self.x, self.channel)
        return self.module.all_gather_rms_norm(self.x, self.weight, self.channel, EPS, 32)


def operand(case: OwnCase, call: int, rank: int) -> Tensor:
    rows = case.world_size if case.kernel == "barrier" else case.M_shard
    return exact_shard(call, rank, rows, N, torch.float32)


def right(case: OwnCase, kernel: str, call: int) -> list[Tensor]:
    shards = [operand(case, call, r) for r in range(case.world_size)]
    if kernel == "barrier":
        return [torch.stack(rows) for rows in zip(*shards, strict=True)]
    return [expected(shards, exact_weight(N, torch.float32), EPS)] * case.world_size


def run(case: OwnCase, package: PackageCopy, schedule: Schedule) -> Scheduler:
    """`Deadlock`, `OutOfBounds` or `WrongResult` unless every rank has computed the reference."""
    host = importlib.import_module("flux_megatron.device.host")
    channels = (f"kernel {case.kernel}",)
    machine = Machine(package, case.world_size, case.ctas, channels, case.last_epoch)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(
            host, "workspace", lambda group, device: machine.workspaces[group.rank()]
        ),
    ):
        module = loaded(case.kernel, package, Path(folder))
        module.SLOTS = SLOTS
        hosts = [Host(case, module, machine, rank) for rank in range(case.world_size)]
        scheduler = machine.run(schedule, lambda rank: hosts[rank].run())
    assert_right(hosts, partial(right, case))
    return scheduler
