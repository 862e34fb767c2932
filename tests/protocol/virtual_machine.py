"""The channels, transfers, strategies and kernels of the package, on virtual ranks in one process.

`PackageCopy` is the package as it is, or, within `mutated`, with one change. `Machine` replaces
what needs processes and devices: the allocation of symmetric memory, the barrier, the agreement,
the copy engine's stream, the size of a persistent grid. Symmetric data starts as NaN, so that what
is read before it has arrived shows in the result.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from emulated_gluon import Gluon
from hopper_kernels import HopperKernels
from imported_anew import Changed, dependents, imported_anew, module_name
from memory_checker import Region, extent
from torch import Tensor
from virtual_collectives import Take, VirtualCollectives
from virtual_ranks import STREAMS, Graph, Schedule, Scheduler

import flux_megatron

SOURCE = Path(flux_megatron.__file__).parent
_MODULES = (
    "errors", "problem", "symm.buffer", "symm.channel", "symm.copy_engine", "symm.cpu_backend",
    "symm.lasting", "symm.places", "symm.signals", "symm.workspace",
    "kernels.launch", "kernels.triton_launch", "kernels.descriptors", "kernels.primitives",
    "kernels.word_primitives", "kernels.hopper_primitives",
    "kernels.few_rows.gemv_ar", "kernels.few_rows.ag_gemv",
    *(f"kernels.hopper.{name}" for name in (
        "signals", "tile_order", "split_k", "scheduler", "ring", "roles", "epilogue",
        "stored_tiles", "gathered_rows", "gathered_sums", "exchanged_tiles", "ag_gemm", "gemm_rs",
        "gemm_exchange", "split_tiles", "config", "gemm", "signalled_gemm",
        "gathered_gemm", "handed_tiles",
    )),
    "kernels.experts.a2a_gemm", "kernels.experts.weights", "kernels.experts.hopper_routes",
    "kernels.experts.hopper_rows", "kernels.experts.hopper_a2a_gemm",
    "kernels.experts.hopper_gemm_a2a", "kernels.experts.token_routes",
    "kernels.experts.token_call",
    "overlap.arrivals", "overlap.transfer", "overlap.gather", "overlap.fused", "overlap.pipelined",
    "overlap.hopper",
    "overlap.low_latency", "overlap.collectives", "overlap.stage", "overlap.gathered_bands",
    "overlap.signalled", "overlap.calls", "overlap.library_gemm",
    "embedding.bags", "embedding.fused_bags", "expert_parallel.once_calls",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """Each `old` must occur exactly once in `path` (below the package); its `new` replaces it."""

    path: str
    changes: tuple[tuple[str, str], ...]

    def apply(self, source: str) -> str:
        for old, new in self.changes:
            found = source.count(old)
            assert found == 1, f"{self.path}: {found} times, expected once: {old!r}"
            source = source.replace(old, new)
        return source


class PackageCopy:
    """The modules of the package as they are now, by their last name: `package.transfer`; those of
    the Hopper kernels with the room before it: `package.hopper_ring`.
    """

    mutation: Mutation | None = None  # of a file that is none of the package: an own kernel's

    def __init__(self) -> None:
        for module in _MODULES:
            name = module.replace("hopper.", "hopper_").rsplit(".")[-1]
            setattr(self, name, importlib.import_module(f"flux_megatron.{module}"))
        self.experts = importlib.import_module("flux_megatron.expert_parallel.fused")
        self.hopper_experts = importlib.import_module("flux_megatron.expert_parallel.hopper")
        self.hopper_kernels = HopperKernels(self)


@contextmanager
def mutated(mutation: Mutation, folder: Path) -> Iterator[PackageCopy]:
    """The package with one change, in `folder`, because the interpreter reads sources. The module
    is imported anew and so is what depends on it; all other modules are those of the package.
    """
    if not (SOURCE / mutation.path).exists():
        package = PackageCopy()
        package.mutation = mutation
        yield package
        return
    changed, file = module_name(mutation.path), folder / Path(mutation.path).name
    file.write_text(mutation.apply((SOURCE / mutation.path).read_text()))
    with imported_anew(dependents(changed)), mock.patch.object(
        sys, "meta_path", [Changed(changed, file), *sys.meta_path]
    ):  # fmt: skip
        yield PackageCopy()


class _Work:
    """A collective in the copy stream, and all that was enqueued there before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._over = scheduler, scheduler.over("copy")

    def wait(self) -> None:
        current = self._scheduler.current_stream
        if current != "copy":
            assert not self._scheduler.capturing
            self._scheduler.hold(current, self._over, "a collective")


class _Group:
    """The part of a process group that the package uses."""

    group_name = "virtual"

    def __init__(self, rank: int, world_size: int, collectives: VirtualCollectives) -> None:
        self._rank, self._world_size, self._collectives = rank, world_size, collectives

    def allreduce(self, tensors: list[Tensor]) -> _Work:
        """In the copy stream, which stands for the communication stream too."""
        return self._sum("all-reduce", *tensors, *tensors, slice(None))

    def _reduce_scatter_base(self, y: Tensor, block: Tensor, options: object) -> _Work:
        mine = slice(self._rank * y.shape[0], (self._rank + 1) * y.shape[0])
        return self._sum("reduce-scatter", y, block, mine)

    def _sum(self, name: str, target: Tensor, source: Tensor, mine: slice) -> _Work:
        def take(brought: list[Tensor]) -> Callable[[], Tensor]:
            shapes = {tensor.shape for tensor in brought}
            assert len(shapes) == 1, f"ranks bring {shapes} to one collective"
            return partial(target.copy_, sum(brought)[mine])

        return self._enqueued(name, source, take)

    def _allgather_base(self, block: Tensor, x: Tensor) -> _Work:
        def take(brought: list[Tensor]) -> Callable[[], Tensor]:
            return partial(block.copy_, torch.cat(brought))

        return self._enqueued("all-gather", x, take)

    def _enqueued(self, name: str, brings: Tensor, take: Take) -> _Work:
        self._collectives.enqueue(name, brings, take)
        return _Work(self._collectives.scheduler())

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size


class _Agreement:
    """All virtual ranks make the same calls, so they agree."""

    broken = ""

    def __init__(self, group: _Group, note: Callable[[], None]) -> None: ...

    def confirm(self, description: str) -> None: ...

    def failure(self) -> str:
        return ""

    def published(self) -> str:
        return ""


def _engine(package: PackageCopy, machine: Machine, name: str = "copy"):
    """The package's CPU copy engine; every copy, signal and wait is a step of the stream of this
    name, of the rank that runs.
    """
    engine, scheduler = package.cpu_backend.CpuCopyEngine(), lambda: machine.scheduler

    class StreamEngine(package.copy_engine.CopyEngine):
        def current(self) -> int:
            return STREAMS.index(scheduler().current_stream)

        def capture(self, stream: int) -> int:
            return int(scheduler().capturing)

        def order(self, later: int, earlier: int) -> None:
            scheduler().order(STREAMS[later], STREAMS[earlier])

        def fork(self) -> None:
            scheduler().order(name, scheduler().current_stream)

        def join(self) -> None:
            scheduler().order(scheduler().current_stream, name)

        def copy(self, *given: int) -> None:
            scheduler().enqueue(name, "push", lambda: engine.copy(*given))

        def copy_rows(self, *given: int) -> None:
            scheduler().enqueue(name, "push", lambda: engine.copy_rows(*given))

        def copy_here(self, *given: int) -> None:
            scheduler().enqueue(scheduler().current_stream, "copy", lambda: engine.copy(*given))

        def wait_count(self, counter: int, count: int) -> None:
            cell, reached = ctypes.c_int32.from_address(counter), package.signals.reached
            scheduler().hold(name, lambda: reached(cell.value, count), f"a word to be {count}")

        def write(self, address: int, word: int) -> None:
            scheduler().enqueue(name, "signal", lambda: engine.write(address, word))

        def stream(self) -> AbstractContextManager[None]:
            return scheduler().within(name)

    return StreamEngine()


class Machine:
    """`world_size` virtual ranks with a workspace each; `run` schedules one host a rank."""

    def __init__(
        self, package: PackageCopy, world_size: int, ctas: int,
        channels: Sequence[str] = ("gather", "scatter"), last_epoch: int = 0,
        mailboxes: bool = False,
    ) -> None:  # fmt: skip
        """`last_epoch` is that of the calls before, in all channels."""
        self._missing = (
            package.places.Missing("no GPU reaches another", True) if mailboxes else None
        )
        self.package, self.world_size = package, world_size
        self._ctas = ctas  # at most, of a persistent kernel
        self.collectives = VirtualCollectives(world_size, lambda: self.scheduler)
        self._groups = [_Group(rank, world_size, self.collectives) for rank in range(world_size)]
        self._allocated: list[tuple[Tensor, ...]] = []
        self._allocations: Counter[int] = Counter()
        self._arrivals: Counter[int] = Counter()
        self._regions: list[Region] = []
        self.scheduler: Scheduler | None = None
        self.workspaces: list = []
        self._flags, self._arriving = (_engine(package, self, n) for n in ("flags", "arrivals"))
        with self._replacing():
            for group in self._groups:
                space = package.workspace.Workspace(group, torch.device("cpu"))
                space.engine = _engine(package, self)
                for name in channels:
                    channel = package.channel.Channel(group, space.device, space._status, mailboxes)
                    channel.epoch, space.channels[name] = last_epoch, channel
                    for pad in (*channel._pads, channel._own_pad(0)):
                        pad.fill_(package.signals.as_int32(last_epoch))
                self.workspaces.append(space)

    def run(self, schedule: Schedule, host: Callable[[int], None]) -> Scheduler:
        """Run `host(rank)` on every rank; returns the scheduler, for its trace."""
        self.scheduler = Scheduler(schedule, self._regions)
        with self._replacing():
            self.scheduler.run([lambda rank=rank: host(rank) for rank in range(self.world_size)])
        return self.scheduler

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        p = self.package

        def barrier(space, reason: str) -> None:
            self._barrier(space.group.rank())

        workspace = {
            "capturing": lambda device: self.scheduler.capturing,
            "Agreement": _Agreement,
            "call_log": lambda group, device: None,
            "places": lambda group, device, doorbell: [],
            "why_unavailable": lambda ranks, group: None,
            "missing": lambda group, device: self._missing,
        }
        with (
            mock.patch.multiple(p.channel, devices=SimpleNamespace(allocate=self._allocate)),
            mock.patch.multiple(p.workspace, **workspace),
            mock.patch.object(p.workspace.Workspace, "_barrier", barrier),
            # the scheduler sees what hosts enqueue by a mode of its own
            mock.patch.multiple(p.lasting, _disable_current_modes=nullcontext),
            mock.patch.multiple(p.launch, persistent_grid=self._persistent_grid),
            mock.patch.multiple(
                p.stage,
                communication_stream=self._communication_stream,
                flag_stream=lambda device: self._flags,
            ),
            mock.patch.multiple(
                p.arrivals,
                arrival_stream=lambda device: self._arriving,
                capturing=lambda device: self.scheduler.capturing,
            ),
            mock.patch.object(p.channel.Channel, "expect"),
            mock.patch.multiple(p.collectives, wait=lambda work, space: work.wait()),
            # functions of torch's that make tensors on the way
            mock.patch.multiple(p.library_gemm, _of_call=self._enqueued(p.library_gemm._of_call)),
            mock.patch.multiple(
                p.primitives, host_wait=self._host_wait, host_arrives=self._host_arrives
            ),
            mock.patch.multiple(p.a2a_gemm, PUSHERS=1),  # the other CTAs help
            mock.patch.multiple(p.word_primitives, host_wait_words=self._host_wait_words),
            mock.patch.multiple(p.ag_gemv, PIECE=16),  # so that few rows are several pieces
            # so that tiles are summed in slices
            mock.patch.multiple(p.gemv_ar, WORDS_A_THREAD=1, LEAST_COLUMNS=4),
            # so that small tiles are stored in slices, of which those of 16 x 32 have two of four
            mock.patch.multiple(p.hopper_config, SLICE_COLUMNS=8, SHARED_BYTES=6200),
            mock.patch.multiple(p.hopper_ag_gemm, SLICE_COLUMNS=8),
            mock.patch.multiple(p.hopper_gathered_gemm, SLICE_COLUMNS=8),
            # so that small problems have tiles to split
            mock.patch.multiple(
                p.hopper_split_tiles, K_TILES_MIN=2, PART_K_TILES=0, LOW_PART_K_TILES=0
            ),
            p.hopper_kernels.launched_on(self._gluon()),
        ):
            yield

    def _enqueued(self, make: Callable[..., Callable[..., Tensor]]) -> Callable[..., object]:
        """Makes functions that are one operation of the stream in which a host calls them."""

        def made(*given: object) -> Callable[..., None]:
            function, enqueue = make(*given), self.scheduler.enqueue
            return lambda *operands: enqueue(
                self.scheduler.current_stream, make.__name__, lambda: function(*operands)
            )

        return made

    def _gluon(self) -> Gluon:
        signals = self.package.signals
        describe_slot = partial(signals.describe_slot, world_size=self.world_size)
        return Gluon(self.scheduler, self._regions, (describe_slot, signals.reached))

    def _allocate(
        self, size_bytes: int, group: _Group, device: torch.device, mailboxes: bool = False
    ):
        rank = group.rank()
        number = self._allocations[rank]
        self._allocations[rank] += 1
        if number == len(self._allocated):
            # pads come first and must be zero; data is allocated while ranks run, and is NaN
            fill = 0 if self.scheduler is None else 0xFF
            shards = [torch.full((size_bytes,), fill, dtype=torch.uint8) for _ in self._groups]
            self._allocated.append(tuple(shards))
            self._regions += [
                extent(shard, f"allocation {number} of rank {r}") for r, shard in enumerate(shards)
            ]
        self._barrier(rank)
        shards = self._allocated[number]
        assert shards[rank].numel() == size_bytes, "ranks allocate different sizes"
        mailbox = None
        if mailboxes:
            mailbox = shards[rank]
            here = mailbox.clone()
            self._regions.append(extent(here, f"allocation {number} of rank {rank}, on its GPU"))
            shards = (*shards[:rank], here, *shards[rank + 1 :])
        pointers = torch.tensor([shard.data_ptr() for shard in shards])
        return self.package.buffer.SymmetricBuffer(rank, shards, pointers, None, mailbox)

    def _barrier(self, rank: int) -> None:
        if self.scheduler is None:  # while the workspaces are made, one rank after another
            return
        self.scheduler.synchronize()
        self._arrivals[rank] += 1
        mine = self._arrivals[rank]
        self.scheduler.wait(
            lambda: all(self._arrivals[r] >= mine for r in range(self.world_size)), "the barrier"
        )

    def _communication_stream(self, device: torch.device):
        return self.workspaces[self.scheduler.rank].engine

    def _persistent_grid(self, device: torch.device, tiles: int, spare_sms: int = 0) -> tuple[int]:
        return (min(self._ctas, tiles),)

    def _host_wait(
        self, address: int, slot: int, epoch: int, deadline: int, record: object
    ) -> None:
        checker = self.scheduler.running.checker
        checker.check_addresses("wait", np.array([address], dtype=np.uint64), 4)
        cell = ctypes.c_int32.from_address(address)
        awaited = self.package.signals.describe_slot(slot, self.world_size)
        self.scheduler.wait(
            lambda: self.package.signals.reached(cell.value, epoch),
            f"{awaited}, epoch {epoch} (slot holds {cell.value})",
        )

    def _host_arrives(self, address: int) -> bool:
        checker = self.scheduler.running.checker
        checker.check_addresses("wait", np.array([address], dtype=np.uint64), 4)
        cell = ctypes.c_int32.from_address(address)
        return self.scheduler.patient(lambda: cell.value != 0, "the flag of a band")

    def _host_wait_words(
        self, addresses: list[int], source: int, epoch: int, deadline: int, record: object
    ) -> None:
        checker = self.scheduler.running.checker
        checker.check_addresses("wait", np.array(addresses, dtype=np.uint64), 8)
        missing = self.package.word_primitives.missing_word
        self.scheduler.wait(
            lambda: missing(addresses, epoch) is None,
            f"words of rank {source}, epoch {epoch} (a word has {missing(addresses, epoch)})",
        )


class Replays:
    """The steps of one host: as they are, or of `captured` ones two of three replays of a graph."""

    def __init__(self, machine: Machine, captured: bool) -> None:
        self._machine, self._captured = machine, captured
        self._graph: Graph | None = None
        self._replayed: Any = None

    def __call__(self, call: int, step: Callable[[], Any]) -> Any:
        """What the step gives; all of a graph are the first one that is captured, of call 1."""
        if not self._captured or call % 3 == 0:
            return step()
        if self._graph is None:
            with self._machine.scheduler.capture() as self._graph:
                self._replayed = step()
        self._graph.replay()
        return self._replayed
