"""The steps of a program (`symm.program`), and the slots that they name.

| step | what it enqueues |
| --- | --- |
| `Move` | what a method of the copy engine does: fork, join, copy, copy_rows, copy_here, signal, \
write, wait_count |
| `Launch` | one of our kernels |
| `TorchCall` | what a function of torch's does with tensors of the call |
| `HostCall` | what a function of ours does on the host, such as to start a collective |
| `Transpose` | nothing: later functions of torch's get the transpose of a matrix |
| caller step | nothing: the caller enqueues, who may borrow a tensor. A segment ends here |

C runs `Move` and `Launch`. `HostCall` and `Transpose` are kinds of `TorchCall`: Python runs them,
between two lists of C. A program with a move that `symm.enqueue` does not know is Python's.

A step names numbers by operands: the epoch, or bytes behind an address that a call brings. A `Slot`
is a tensor of a call that has a shape already: x, w, the bias, the scales of FP8, what the call
makes, part of a channel's memory, or what a program keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flux_megatron.symm.buffer import Region
from flux_megatron.symm.device import active, is_active
from flux_megatron.symm.enqueue import EPOCHS, Operand, X, always
from flux_megatron.symm.signals import as_int32


class Program(Protocol):
    """What a slot needs of the program that it belongs to."""

    device: torch.device
    is_cuda: bool

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot: ...


class Slot:
    """A contiguous tensor of a call, at the address that `operand` names: all of x, w, the bias, a
    scale, or what the call makes, or these `rows` of it.
    """

    rows: slice | None = None

    def __init__(
        self, program: Program, operand: Operand, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.program, self.operand, self.shape, self.dtype = program, operand, shape, dtype
        self.device, self.is_cuda = program.device, program.is_cuda
        self._place = operand.register - X.register  # among a call's tensors

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Slot:
        """Some rows of a matrix."""
        first, last, _ = rows.indices(self.shape[0])
        columns = self.shape[1]
        pitch = columns * self.dtype.itemsize
        part = copy(self)
        part.operand = self.operand.plus(first * pitch)
        begin = part.operand.add // pitch
        part.shape, part.rows = (last - first, columns), slice(begin, begin + last - first)
        return part

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Slot:
        return self.program.new(shape, dtype or self.dtype)

    def of(self, call: Any) -> Tensor:
        """The tensor of a call."""
        tensor = call.tensors[self._place]
        return tensor if self.rows is None else tensor[self.rows]


class RegionSlot(Slot):
    """Part of this rank's region of a channel, by the channel's number."""

    channel = 0

    def of(self, call: Any) -> Tensor:
        region = call.calls[self.channel].region
        return region.prepared(_view, self.shape, self.dtype, self.operand.add)


def _view(region: Region, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    return region.view(region.rank, shape, dtype, offset)


class FixedSlot(Slot):
    """A tensor of `Region.fixed` of a channel, whatever shape it has, or the same bytes as another
    type.
    """

    def __init__(
        self, program: Program, operand: Operand, dtype: torch.dtype, channel: int, place: int
    ) -> None:
        super().__init__(program, operand, (), dtype)
        self.channel, self.place = channel, place

    def view(self, dtype: torch.dtype) -> FixedSlot:
        return FixedSlot(self.program, self.operand, dtype, self.channel, self.place)

    def of(self, call: Any) -> Tensor:
        tensor = call.calls[self.channel].region.fixed[self.place]
        return tensor if tensor.dtype is self.dtype else tensor.view(self.dtype)


class KeptSlot(Slot):
    """A tensor that is the same in all calls of a program."""

    def __init__(self, program: Program, tensor: Tensor) -> None:
        operand = always(tensor.data_ptr())
        super().__init__(program, operand, tuple(tensor.shape), tensor.dtype)
        self._tensor = tensor

    def of(self, call: Any) -> Tensor:
        return self._tensor


class Move(NamedTuple):
    method: str
    operands: tuple[Operand, ...]

    def run(self, call: Any) -> None:
        getattr(call.engine, self.method)(*map(call.number, self.operands))


class Launch(NamedTuple):
    """`tensors` are slots, what describes slots, and None; `numbers` are numbers and operands."""

    launcher: Any
    tensors: Sequence[Any]
    numbers: Sequence[Any]
    grid: tuple[int, ...]

    def run(self, call: Any) -> None:
        tensors = [None if one is None else _given(one, call) for one in self.tensors]
        self.launcher.launch(tensors, [_number(one, call) for one in self.numbers], self.grid)


def _given(one: Any, call: Any) -> Any:
    """The tensor of a slot, or a descriptor of it."""
    return one.of(call) if isinstance(one, Slot) else one.of(one.slot.of(call))


def _number(number: Any, call: Any) -> Any:
    if not isinstance(number, Operand):
        return number
    value = call.number(number)
    return as_int32(value) if number in EPOCHS else value


class TorchCall(NamedTuple):
    function: Callable[..., object]
    slots: tuple[Slot, ...]

    def run(self, call: Any) -> None:
        self.function(*[slot.of(call) for slot in self.slots])


class HostCall(TorchCall):
    """What a function of ours does on the host with the call and these tensors of it; the device
    of the call is the current one, which C and functions of torch's need not have.
    """

    def run(self, call: Any) -> None:
        tensors = [slot.of(call) for slot in self.slots]
        if is_active(call.space.device):
            self.function(call, *tensors)
            return
        with active(call.space.device):
            self.function(call, *tensors)


class Transpose(TorchCall):
    """What `function`, a transpose, makes of a slot's tensor stands in its place from then on."""

    def run(self, call: Any) -> None:
        for slot in self.slots:
            call.tensors[slot._place] = self.function(call.tensors[slot._place])


Step = Move | Launch | TorchCall
