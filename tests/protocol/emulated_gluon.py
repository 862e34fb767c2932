"""The part of Gluon that the Hopper kernels use, in plain Python: their own source runs on CPU.

`Gluon` gives the names that a kernel's functions call. Tiles are torch tensors, scalars are Python
numbers. Each warp partition of a CTA is a strand of the scheduler, so that it really waits at
mbarriers, signals and flags. TMA is asynchronous: loads and stores are strands of their own, which
may run late, and a store is first read and then written. An MMA reads its operands when it is
awaited, as late as it may. Shared memory begins as NaN.

Not modelled: layouts, threads within a partition, fences. `test_hopper_ptx.py` asks for fences.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from emulated_memory import (
    Accumulator,
    Barrier,
    Barriers,
    Descriptor,
    MBarrierLayout,
    Misuse,
    Pointer,
    PointerType,
    Shared,
    Transfers,
)
from memory_checker import OutOfBounds, Region
from torch import Tensor
from virtual_ranks import Scheduler, Strand

from flux_megatron.kernels.sizes import cdiv

_POISON = 0x5A5A5A5A  # in integers that nobody has written


class Gluon:
    """`names` is what kernels see, beside what they define themselves."""

    def __init__(self, scheduler: Scheduler, regions: Sequence[Region], told: Callable) -> None:
        self._scheduler, self._regions, self._told = scheduler, regions, told
        self._issued: dict[Strand, int] = {}  # MMAs of a partition

    def names(self) -> dict[str, object]:
        nothing = lambda *args, **options: None  # noqa: E731
        gl = {name: getattr(self, name) for name in (
            "load", "store", "atomic_add", "atomic_xchg", "allocate_shared_memory",
            "warp_specialize", "program_id", "num_programs",
        )}  # fmt: skip
        gl |= {name: getattr(torch, name) for name in ("abs", "float32", "int32", "int64")}
        layouts = ("SliceLayout", "BlockedLayout", "SwizzledSharedLayout", "NVMMADistributedLayout")
        gl |= {name: nothing for name in layouts}
        gl |= {
            "cdiv": cdiv, "static_range": range, "pointer_type": PointerType,
            "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            "sum": lambda tensor, axis: tensor.sum(axis).item(),
            "max": _largest, "maximum": max, "where": torch.where,
            "min": lambda tensor, axis: tensor.amin(axis).item(),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            "arange": lambda first, last, layout: torch.arange(first, last),
            "multiple_of": lambda value, number: value,
            "reshape": torch.reshape, "permute": torch.permute,
            "split": lambda tensor: tensor.unbind(-1),
            "convert_layout": lambda tensor, layout: tensor,
        }  # fmt: skip
        mbarrier = {
            "MBarrierLayout": MBarrierLayout, "init": self._init, "expect": self._expect,
            "arrive": self._arrive, "wait": self._wait_phase, "invalidate": Barrier.invalidate,
        }  # fmt: skip
        tma = {
            "store_wait": self._store_wait,
            "make_tensor_descriptor": self._make_descriptor,
        }
        return {
            "gl": SimpleNamespace(**gl), "mbarrier": SimpleNamespace(**mbarrier),
            "tma": SimpleNamespace(**tma), "tma_load": self._copy_in,
            "tma_store": self._copy_out, "fence_async_shared": nothing, "barrier": nothing,
            "reinterpret": Shared.reinterpret,
            "warpgroup_mma_init": self._mma_init, "warpgroup_mma": self._mma,
            "warpgroup_mma_wait": self._mma_wait, "mma_layout": nothing,
            "time_ns": lambda: 0,
            "wait_acquire_sys": self._wait_acquire, "wait_acquire_gpu": self._wait_acquire,
            "arrives_acquire_sys": self._arrives,
            "complete_tma_stores": self._complete_stores, "cast": self.cast,
            "begin_claim": lambda word: self.atomic_xchg(word, 1, "relaxed", "gpu"),
            "begin_draw": lambda counter: self.atomic_add(counter, 1, "relaxed", "gpu"),
            "end_draw": lambda ticket: ticket, "uniform": lambda value: value,
            "here": lambda value: value,
        }  # fmt: skip

    def kernel(self, name: str, parameters: list[str], body: Callable) -> object:
        """Something to launch like a kernel of Triton's: `kernel[grid](...)`."""

        def launch(grid: tuple[int, ...], *arguments, num_warps: int, num_stages: int) -> None:
            given = [_argument(argument) for argument in arguments]
            self._scheduler.put_grid(name, grid, lambda: self._cta(partial(body, *given)))

        class Kernel:
            __name__ = name
            arg_names = parameters

            def __getitem__(self, grid: tuple[int, ...]) -> Callable:
                return partial(launch, grid)

        return Kernel()

    def _cta(self, body: Callable[[], None]) -> None:
        body()
        self._join(self._scheduler.running)

    def _join(self, cta: Strand) -> None:
        self._scheduler.wait(lambda: not cta.children, "its warps")

    # What kernels call, in the order of Gluon's documentation.

    def program_id(self, axis: int) -> int:
        return self._scheduler.running.place[axis]

    def num_programs(self, axis: int) -> int:
        return self._scheduler.running.grid[axis]

    def warp_specialize(self, partitions: list, warps: list[int], registers: list[int]) -> None:
        cta = self._scheduler.running
        assert len(warps) == len(registers) == len(partitions) - 1
        for function, arguments in partitions:
            self._scheduler.spawn(cta, function.__name__, partial(function, *arguments))
        self._join(cta)

    def allocate_shared_memory(self, dtype, shape: Sequence[int], layout: object):
        if isinstance(layout, MBarrierLayout):
            return Barriers(shape[0]) if len(shape) == 2 else Barrier()
        poison = math.nan if dtype.is_floating_point else _POISON
        return Shared(torch.full(shape, poison, dtype=dtype))

    def load(self, pointer: Pointer, mask: Tensor | None = None, other=0, volatile: bool = False):
        self._touch()
        pointer.check(mask)
        if not isinstance(pointer.at, Tensor):
            return pointer.memory[pointer.at].item()
        if mask is None:
            return pointer.memory[pointer.at]
        return torch.where(mask, pointer.memory[pointer.at.where(mask, 0)], other)

    def store(self, pointer: Pointer, value, mask: Tensor | None = None) -> None:
        self._touch()
        pointer.check(mask)
        at = torch.as_tensor(pointer.at)
        value = torch.as_tensor(value).to(pointer.memory.dtype).expand(at.shape)
        pointer.memory[at if mask is None else at[mask]] = value if mask is None else value[mask]

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        seen = self.load(pointer)
        pointer.memory[pointer.at] += value
        return seen

    def atomic_xchg(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        seen = self.load(pointer)
        pointer.memory[pointer.at] = value
        return seen

    def cast(self, value, kind, bitcast: bool = False):
        """`value.to(kind)`: of a tensor, a number, or an address that becomes a pointer."""
        if isinstance(kind, PointerType):
            pointer = isinstance(value, Pointer)
            return value.to(kind) if pointer else self._pointer(value, kind.element)
        if bitcast:  # of a number
            had = torch.int32 if kind.is_floating_point else torch.float32
            return torch.tensor(value, dtype=had).view(kind).item()
        return value.to(kind) if isinstance(value, Tensor) else value

    def _pointer(self, address: int, dtype: torch.dtype) -> Pointer:
        """To all that lies behind the address in memory which ranks share."""
        for first, end, _ in self._regions:
            if first <= address < end:
                count = (end - address) // dtype.itemsize
                memory = (ctypes.c_char * (end - address)).from_address(address)
                return Pointer(torch.frombuffer(memory, dtype=dtype, count=count))
        raise OutOfBounds(f"{address:#x} is no address of symmetric memory")

    def _touch(self) -> None:
        self._scheduler.preemption_point()

    def _wait_acquire(self, pad: Pointer, slot: int, epoch: int, deadline: int, status) -> None:
        told, reached = self._told
        cell = ctypes.c_int32.from_address((pad + slot).address)
        self._touch()
        self._scheduler.wait(
            lambda: reached(cell.value, epoch),
            f"{told(slot)}, epoch {epoch} (slot holds {cell.value})",
        )

    def _arrives(self, flag: Pointer, waited: Pointer, patience_us: int) -> bool:
        cell = ctypes.c_int32.from_address(flag.address)
        self._touch()
        return self._scheduler.patient(lambda: cell.value != 0, "the flag of a band")

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def _expect(self, barrier: Barrier, size_bytes: int) -> None:
        self._touch()
        barrier.arrive(1, size_bytes)

    def _arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        self._touch()
        barrier.arrive(count if pred else 0)

    def _wait_phase(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        self._touch()
        if barrier.count is None:
            raise Misuse("an mbarrier is awaited before its initialisation")
        if pred:
            self._scheduler.wait(
                lambda: barrier.phases & 1 != parity, f"phase {parity} of an mbarrier"
            )

    def _mma_init(self, acc: Accumulator | Tensor) -> Accumulator:
        return acc if isinstance(acc, Accumulator) else Accumulator(acc)

    def _mma(
        self, left: Shared, right: Shared, acc: Accumulator, is_async: bool, use_acc: bool = True
    ) -> Accumulator:
        partition = self._scheduler.running
        number = self._issued.get(partition, 0)
        self._issued[partition] = number + 1
        if not use_acc:
            acc = Accumulator(torch.zeros_like(acc.sums))
        return Accumulator(acc.sums, (*acc.pending, (number, left, right)))

    def _mma_wait(self, num_outstanding: int, deps: Sequence[Accumulator]):
        (acc,) = deps
        return acc.wait(self._issued.get(self._scheduler.running, 0) - num_outstanding)

    def _transfers(self, name: str) -> Transfers:
        """Of this partition: it awaits its own alone."""
        strand = self._scheduler.running
        if strand.state is None:
            strand.state = {one: Transfers(one) for one in ("TMA loads", "TMA stores")}
        return strand.state[name]

    def _later(self, transfers: Transfers, *steps: Callable[[], None]) -> None:
        transfers.issued += 1
        idle = not transfers.steps
        transfers.steps.extend(steps)
        if idle:
            self._scheduler.spawn(
                self._scheduler.running.cta, transfers.name, partial(self._drain, transfers)
            )

    def _drain(self, transfers: Transfers) -> None:
        while transfers.steps:
            transfers.steps[0]()
            transfers.steps.popleft()
            if transfers.steps:
                self._scheduler.running.pause()

    def _copy_in(self, source: Descriptor, place, barrier: Barrier, target: Shared) -> None:
        self._touch()

        def arrive() -> None:
            inside, where = source.tile(place)
            target.memory.zero_()
            target.memory[where] = inside
            barrier.arrive(size_bytes=-source.block_type.nbytes)

        self._later(self._transfers("TMA loads"), arrive)

    def _copy_out(self, target: Descriptor, place, source: Shared) -> None:
        self._touch()
        stores, tiles = self._transfers("TMA stores"), []

        def read() -> None:
            tiles.append(source.memory.clone())
            stores.read += 1

        def write() -> None:
            inside, where = target.tile(place)
            inside.copy_(tiles[0][where])
            stores.written += 1

        self._later(stores, read, write)

    def _store_wait(self, pendings: int) -> None:
        stores = self._transfers("TMA stores")
        until = stores.issued - pendings
        self._scheduler.wait(lambda: stores.read >= until, "its TMA stores to be read")

    def _complete_stores(self) -> None:
        stores = self._transfers("TMA stores")
        until = stores.issued
        self._scheduler.wait(lambda: stores.written >= until, "its TMA stores to be written")

    def _make_descriptor(self, base: Pointer, shape, strides, block, layout) -> Descriptor:
        rows, columns = shape
        assert list(strides) == [columns, 1], f"strides {strides} given, contiguous rows expected"
        end = base.at + rows * columns
        (base + (end - base.at - 1)).check()
        return Descriptor(base.memory[base.at : end].view(rows, columns), block)


def _largest(tensor: Tensor, axis: int):
    found = tensor.amax(axis)
    return found if found.ndim else found.item()


def _argument(argument):
    return Pointer(argument.view(-1)) if isinstance(argument, Tensor) else argument
