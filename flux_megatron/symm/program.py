"""What one call enqueues, as a list that a strategy builds from the shapes of the call.

| step | what it enqueues |
| --- | --- |
| `Move` | what a method of the copy engine does: fork, join, copy, copy_rows, copy_here, signal, \
write, wait_count |
| `Launch` | one of our kernels |
| `Torch` | what a function of torch's does with tensors of the call |
| turn | nothing: the caller's turn, who may be lent a tensor. A segment ends and another begins |

A step names numbers by operands: the epoch, or bytes behind an address that a call brings. A `Slot`
is a tensor of a call that has a shape already: x, w, the bias, what the call makes, or part of a
channel's memory. So a program holds no memory and serves every call of its shapes.

`overlap.calls` runs programs. Kernels' functions on the host take slots as they take tensors: a
launcher that is given slots adds a `Launch` to their program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flux_megatron.symm.channel import Channel
from flux_megatron.symm.enqueue import BIAS, EPOCHS, MADE, TABLE, Operand, W, X, always
from flux_megatron.symm.groups import timeout_s
from flux_megatron.symm.signals import as_int32, slot_bytes

if TYPE_CHECKING:
    from flux_megatron.problem import Plan
    from flux_megatron.symm.workspace import Workspace


class Slot:
    """A contiguous tensor of a call, at the address that `operand` names. `whole`: it is all of a
    tensor of the call, not a part of one.
    """

    __slots__ = ("dtype", "operand", "program", "shape", "whole")

    def __init__(
        self, program: CallProgram, operand: Operand, shape: tuple[int, ...], dtype: torch.dtype,
        whole: bool = True,
    ) -> None:  # fmt: skip
        self.program, self.operand, self.whole = program, operand, whole
        self.shape, self.dtype = shape, dtype

    @property
    def device(self) -> torch.device:
        return self.program.device

    @property
    def is_cuda(self) -> bool:
        return self.program.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Slot:
        first, last, _ = rows.indices(self.shape[0])
        shape = (last - first, *self.shape[1:])
        at = self.operand.plus(first * math.prod(shape[1:]) * self.dtype.itemsize)
        return Slot(self.program, at, shape, self.dtype, whole=False)

    def view(self, dtype: torch.dtype) -> Slot:
        return Slot(self.program, self.operand, self.shape, dtype, whole=False)

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Slot:
        return self.program.new(shape, dtype or self.dtype)

    def of(self, call: Any) -> Tensor:
        """The tensor of a call."""
        register, offset = self.operand
        if register >= TABLE:
            return call.of_channel(self)
        tensor: Tensor = call.tensors[register - X.register]
        if self.whole:
            return tensor
        first = tensor.storage_offset() + offset // self.dtype.itemsize
        return tensor.as_strided(self.shape, _strides(self.shape), first)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Move(NamedTuple):
    method: str
    operands: tuple[Operand, ...]

    def run(self, call: Any) -> None:
        getattr(call.engine, self.method)(*map(call.number, self.operands))


class Launch(NamedTuple):
    """`tensors` are slots, what describes slots, and None; `numbers` are numbers and operands."""

    launcher: Any
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...]
    grid: tuple[int, ...]

    def run(self, call: Any) -> None:
        tensors = [None if one is None else one.of(call) for one in self.tensors]
        self.launcher.launch(tensors, [_number(one, call) for one in self.numbers], self.grid)


def _number(number: Any, call: Any) -> Any:
    if not isinstance(number, Operand):
        return number
    value = call.number(number)
    return as_int32(value) if number in EPOCHS else value


class Torch(NamedTuple):
    function: Callable[..., object]
    slots: tuple[Slot, ...]

    def run(self, call: Any) -> None:
        self.function(*[slot.of(call) for slot in self.slots])


Step = Move | Launch | Torch


class ChannelSlots:
    """A channel's region of a call, as slots and operands. `first` is its first register."""

    def __init__(
        self, program: CallProgram, name: str, size_bytes: int, kind: type[Channel]
    ) -> None:
        self.name, self.size_bytes, self.kind, self.program = name, size_bytes, kind, program
        before = program.channels[-1:]
        self.first = before[0].first + before[0].words if before else TABLE
        self._fixed = self.first + 2 * program.world_size + 1
        self.words = 2 * program.world_size + 1 + len(kind.FIXED)
        self.epoch = EPOCHS[len(program.channels)]
        self.half_words = Operand(self._fixed - 1)  # of 64 bits, in the region

    def region(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """This rank's region from its beginning on."""
        return Slot(self.program, self.peer(self.program.rank), shape, dtype, whole=False)

    def peer(self, rank: int) -> Operand:
        """The address of a rank's region."""
        return Operand(self.first + rank)

    def slot(self, rank: int, source: int, comm_tile: int) -> Operand:
        """The address of a rank's slot of signals for a communication tile of `source`."""
        return Operand(self.first + self.program.world_size + rank, slot_bytes(source, comm_tile))

    def fixed(self, name: str) -> Slot:
        """A tensor of `Channel.FIXED`, of whatever shape it has."""
        operand = Operand(self._fixed + [*self.kind.FIXED].index(name))
        return Slot(self.program, operand, (), self.kind.FIXED[name])

    def in_region(self, register: int) -> int | None:
        """Which of a region's `fixed` a register is the address of; -1 for this rank's region; None
        for one of another channel.
        """
        if not self.first <= register < self.first + self.words:
            return None
        return max(-1, register - self._fixed)


class CallProgram:
    """The steps of a call of these shapes: `segments` of phases, each a name and its steps, between
    the caller's turns. `lent` are what those lend, `made` what a call makes, `held` what pushes or
    joined streams read, `result` is the call's.
    """

    def __init__(
        self, space: Workspace, plan: Plan, x: Tensor, w: Tensor | None, bias: Tensor | None,
        turns: bool,
    ) -> None:  # fmt: skip
        self.space, self.plan, self.turns, self.device = space, plan, turns, x.device
        self.rank, self.world_size = space.group.rank(), space.world_size
        self.timeout_ns = int(timeout_s(space.group) * 1e9)
        self.x = Slot(self, X, tuple(x.shape), x.dtype)
        self._w = None if w is None else Slot(self, W, tuple(w.shape), w.dtype)
        self.bias = None if bias is None else Slot(self, BIAS, tuple(bias.shape), bias.dtype)
        self.channels: list[ChannelSlots] = []
        self.made: list[tuple[tuple[int, ...], torch.dtype | None]] = []  # None: that of x
        self.segments: list[list[tuple[str, list[Step]]]] = [[("", [])]]
        self.lent: list[Slot | None] = []
        self.held: list[Slot] = []
        self.result: Slot | None = None
        self.lists: Any = None  # of C, when there are any (`overlap.lists`)
        self.attempts, self.unlisted = 0, ""  # to make lists, and why the last one failed

    @property
    def w(self) -> Slot:
        assert self._w is not None, "a program of a gather has no weight"
        return self._w

    def channel(self, name: str, size_bytes: int, kind: type[Channel] = Channel) -> ChannelSlots:
        """A channel that a call opens when it begins, with so many bytes in its region."""
        self.channels.append(ChannelSlots(self, name, size_bytes, kind))
        return self.channels[-1]

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """What a call makes."""
        self.made.append((shape, None if dtype is self.x.dtype else dtype))
        return Slot(self, Operand(MADE + len(self.made) - 1), shape, dtype)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Steps inside belong to this phase of the call (`overlap.phase`)."""
        self.segments[-1].append((name, []))
        yield
        self.segments[-1].append(("", []))

    def turn(self, lent: Slot | None = None) -> None:
        """The caller's turn, to whom this is lent; nothing in a program without turns."""
        if not self.turns:
            return
        self.lent.append(lent)
        self.segments.append([("", [])])

    def add(self, step: Step) -> None:
        self.segments[-1][-1][1].append(step)

    def torch(self, function: Callable[..., object], *slots: Slot) -> None:
        self.add(Torch(function, slots))

    def move(self, method: str, *operands: Operand) -> None:
        self.add(Move(method, operands))

    def copy(self, to: Operand, source: Slot, method: str = "copy") -> None:
        """The bytes of a slot; by "copy_here" in the caller's stream."""
        self.move(method, to, source.operand, always(source.nbytes))

    def signal(self, at: Operand, channel: ChannelSlots) -> None:
        """The call's epoch, after everything copied before."""
        self.move("signal", at, channel.epoch)

    def send_when(self, counter: Operand, count: int) -> None:
        """What is pushed from now on comes after a counter of this GPU has reached a count."""
        self.move("wait_count", counter, always(count))

    def clear(self, counters: Sequence[Operand]) -> None:
        for counter in counters:
            self.move("write", counter, always(0))
