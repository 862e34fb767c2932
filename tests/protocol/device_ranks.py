"""Own kernels on virtual ranks: that of scripts/own_kernel.py, and one with a rank barrier."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from own_kernel_cases import EPS, SCRIPTS, exact_shard, exact_weight, expected
from torch import Tensor
from virtual_hosts import VirtualHost, run_hosts
from virtual_machine import Machine, PackageCopy
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
        host = importlib.import_module("flux_megatron.device.host")
        channels = (f"kernel {self.kernel}",)
        machine = Machine(package, self.world_size, self.ctas, channels, self.last_epoch)
        spaces = mock.patch.object(
            host, "workspace", lambda group, device: machine.workspaces[group.rank()]
        )
        with tempfile.TemporaryDirectory() as folder, spaces:
            module = loaded(self.kernel, package, Path(folder))
            module.SLOTS = SLOTS
            return run_hosts(partial(Host, module), self, Operands(self), machine, schedule)


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


class Operands:
    def __init__(self, case: OwnCase) -> None:
        self.case, ranks = case, range(case.world_size)
        rows = case.world_size if case.kernel == "barrier" else case.M_shard
        self.x = [
            [exact_shard(call, rank, rows, N, torch.float32) for rank in ranks]
            for call in range(case.calls)
        ]

    def expected(self, kernel: str, call: int) -> list[Tensor]:
        shards = self.x[call]
        if kernel == "barrier":
            return [torch.stack(rows) for rows in zip(*shards, strict=True)]
        return [expected(shards, exact_weight(N, torch.float32), EPS)] * len(shards)


class Host(VirtualHost):
    OPERANDS = ("x",)

    def __init__(self, module: ModuleType, *about: Any) -> None:
        super().__init__(*about)
        self.module = module
        self.channel = module.Channel(self.case.kernel, self.space.group, torch.device("cpu"))
        self.weight = exact_weight(N, torch.float32)

    def step(self, call: int, x: Tensor) -> dict[str, Tensor]:
        if self.case.kernel == "barrier":
            return {"barrier": self.module.all_to_all(x, self.channel)}
        y = self.module.all_gather_rms_norm(x, self.weight, self.channel, EPS, 32)
        return {"norm": y}
