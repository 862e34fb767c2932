"""What one call enqueues, as a list of steps that a strategy builds from the shapes of the call: a
program holds no memory but what is `kept`, and serves every call of its shapes.

`overlap.calls` runs programs. Kernels' functions on the host take slots as they take tensors: a
launcher that is given slots adds a `Launch` to their program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flux_megatron.symm.channel import Channel
from flux_megatron.symm.enqueue import (
    BIAS,
    EPOCHS,
    MADE,
    TABLE,
    W_SCALE,
    X_SCALE,
    Operand,
    W,
    X,
    always,
)
from flux_megatron.symm.signals import slot_bytes
from flux_megatron.symm.steps import (
    FixedSlot,
    HostCall,
    KeptSlot,
    Move,
    RegionSlot,
    Slot,
    Step,
    TorchCall,
    Transpose,
)

if TYPE_CHECKING:
    from flux_megatron.problem import Plan
    from flux_megatron.scaling import Scaling
    from flux_megatron.symm.workspace import Workspace

# what kernels' functions on the host take
Memory = TypeVar("Memory", Tensor, Slot)
Number = int | Operand
Operands = Tensor | Slot
# It adds the steps of a call to a program and gives the result's slot, or None.
Builder = Callable[["CallProgram"], "Slot | None"]


class ChannelSlots:
    """A channel's region of a call, as slots and operands. `first` is its first register."""

    def __init__(
        self, program: CallProgram, name: str, size_bytes: int, kind: type[Channel]
    ) -> None:
        self.name, self.size_bytes, self.kind, self.program = name, size_bytes, kind, program
        self.number = len(program.channels)
        # as `Region.words` has them
        self.words: int = 2 * program.world_size + 1 + len(kind.FIXED)
        self.first: int = TABLE + sum(one.words for one in program.channels)
        self._fixed = self.first + 2 * program.world_size + 1
        self.epoch = EPOCHS[self.number]
        self.half_words = Operand(self._fixed - 1)  # of 64 bits, in the region

    def region(self, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> RegionSlot:
        """This rank's region from its byte `first` on."""
        slot = RegionSlot(self.program, self.peer(self.program.rank, first), shape, dtype)
        slot.channel = self.number
        return slot

    def peer(self, rank: int, offset: int = 0) -> Operand:
        """So many bytes behind the beginning of a rank's region."""
        return Operand(self.first + rank, offset)

    def signal(self, rank: int, source: int, comm_tile: int) -> Operand:
        """The address of the signal by which `source` tells a rank of a communication tile."""
        return Operand(self.first + self.program.world_size + rank, slot_bytes(source, comm_tile))

    def fixed(self, name: str) -> FixedSlot:
        """A tensor of `Channel.FIXED`."""
        place, dtype = self.kind.FIXED[name]
        return FixedSlot(self.program, Operand(self._fixed + place), dtype, self.number, place)


class CallProgram:
    """The steps of a call of these shapes: `segments` of phases, each a name and its steps, between
    caller steps. `borrowed` are what the caller borrows in those, `made` what a call makes, `held`
    what pushes or joined streams read.
    """

    def __init__(
        self, space: Workspace, plan: Plan, x: Operands, w: Operands | None,
        bias: Operands | None, layout: str, caller_steps: bool, scaling: Scaling | None = None,
    ) -> None:  # fmt: skip
        self.space, self.plan, self.layout, self.caller_steps = space, plan, layout, caller_steps
        self.device: torch.device = x.device
        self.is_cuda: bool = x.device.type == "cuda"
        self.rank, self.world_size = space.rank, space.world_size
        self.timeout_ns = space.timeout_ns
        self.x = Slot(self, X, tuple(x.shape), x.dtype)
        self._w = None if w is None else Slot(self, W, tuple(w.shape), w.dtype)
        self.bias = None if bias is None else Slot(self, BIAS, tuple(bias.shape), bias.dtype)
        self.scaling: Any = None
        if scaling is not None:
            given = (X_SCALE, scaling.x), (W_SCALE, scaling.w)
            slots: Any = [Slot(self, at, tuple(one.shape), torch.float32) for at, one in given]
            self.scaling = scaling._replace(x=slots[0], w=slots[1])
        self.channels: tuple[ChannelSlots, ...] = ()
        self.made: tuple[tuple[tuple[int, ...], torch.dtype | None], ...] = ()  # None: that of x
        self.segments: list[list[tuple[str, list[Step]]]] = [[]]
        self._steps: list[Step]
        self._name("")
        self.borrowed: tuple[Slot | None, ...] = ()
        self.held: tuple[Slot, ...] = ()
        self.y: int | None = None  # the result's place in `made`
        self.follows = False  # what it enqueues comes after what earlier calls have enqueued
        self._builder: Builder
        self._keeps = False
        self.lists: Any = None  # of C, when there are any (`overlap.by_c`)
        self.attempts, self.unlisted = 0, ""  # to make lists, and why the last one failed

    def built_by(self, build: Builder) -> CallProgram:
        self._builder, slot = build, build(self)
        self.y = None if slot is None else slot.operand.register - MADE
        return self

    def forget_steps(self) -> None:
        """C has them in its lists. With a hundred objects more a call of new rows, Python's
        collector walked over all that lives, .1 s, about each fifty micro-batches (CPU, 2026-11-30,
        in no row). It may be why two of 40 waited on 2 x H200 (h200x2/dynamic_rows.jsonl).
        """
        if not self._keeps:
            self.segments, self._steps = [], []

    def segment(self, at: int) -> list[tuple[str, list[Step]]]:
        """Built again where they are forgotten."""
        if not self.segments:
            again = CallProgram(
                self.space, self.plan, self.x, self._w, self.bias, self.layout, self.caller_steps,
                self.scaling,
            )  # fmt: skip
            self.segments = again.built_by(self._builder).segments
        return self.segments[at]

    @property
    def w(self) -> Slot:
        assert self._w is not None, "a program of a gather has no weight"
        return self._w

    @property
    def N(self) -> int:
        """The columns of x @ w on this rank."""
        return self.w.shape[0 if self.layout == "nt" else 1]

    def channel(self, name: str, size_bytes: int, kind: type[Channel] = Channel) -> ChannelSlots:
        """A channel that a call opens when it begins, with so many bytes in its region."""
        self.channels += (ChannelSlots(self, name, size_bytes, kind),)
        self.follows = True
        return self.channels[-1]

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """What a call makes."""
        register = MADE + len(self.made)
        assert register < TABLE, f"a call makes at most {TABLE - MADE} tensors"
        self.made += ((shape, None if dtype is self.x.dtype else dtype),)
        return Slot(self, Operand(register), shape, dtype)

    def kept(self, tensor: Tensor) -> KeptSlot:
        """A tensor that lives as long as the program: the same in all calls."""
        self._keeps = True
        return KeptSlot(self, tensor)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Steps inside belong to this phase of the call (`overlap.phase`), then to that around."""
        around, _ = self.segments[-1][-1]
        self._name(name)
        yield
        self._name(around)

    def _name(self, phase: str) -> None:
        self._steps = []
        self.segments[-1].append((phase, self._steps))

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def caller_step(self, borrowed: Slot | None = None) -> None:
        """The caller enqueues, and may borrow this; nothing in a program without caller steps."""
        if self.caller_steps:
            self.borrowed += (borrowed,)
            self.segments.append([])
            self._name("")

    def torch(self, function: Callable[..., object], *slots: Slot) -> None:
        self.add(TorchCall(function, slots))

    def host(self, function: Callable[..., object], *slots: Slot) -> None:
        """`function(call, *tensors)`."""
        self.add(HostCall(function, slots))

    def transpose(self, *slots: Slot) -> None:
        """In place of these matrices, later functions of torch's get their transposes."""
        self.add(Transpose(Tensor.t, slots))

    def move(self, method: str, *operands: Operand) -> None:
        """What this method of the copy engine does."""
        self.add(Move(method, operands))

    def copy(self, to: Operand, source: Slot, method: str = "copy") -> None:
        """The bytes of a slot; by "copy_here" in the caller's stream."""
        self.move(method, to, source.operand, always(source.nbytes))
