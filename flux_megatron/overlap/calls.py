"""Calls by their programs (`symm.program`), which C or Python runs.

C runs the lists of a program (`overlap.by_c`). Python runs the same steps one by one: on CPU, in a
capture, for a profiler, NVTX or hooks of Triton, before kernels are compiled, and where there is no
C compiler or FLUX_MEGATRON_NATIVE=0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from flux_megatron import settings
from flux_megatron.kernels import triton_launch
from flux_megatron.overlap import by_c, transfer
from flux_megatron.overlap.by_c import Lists, Made
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Plan
from flux_megatron.scaling import Scaling
from flux_megatron.symm.channel import Call
from flux_megatron.symm.device import active, capturing
from flux_megatron.symm.enqueue import MADE, TABLE, Operand, X
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.steps import TorchCall
from flux_megatron.symm.workspace import Workspace

_UNNAMED = nullcontext()
_MADE = MADE - X.register  # the place of the first tensor that a call makes, behind its operands


def is_watched() -> bool:
    """Whether somebody wants to see the phases or the launches of a call."""
    if profiler._is_profiler_enabled or triton_launch.has_hooks():
        return True
    return settings.get().nvtx


def program_of(
    build: Builder, x: Tensor, w: Tensor | None, bias: Tensor | None, layout: str, plan: Plan,
    space: Workspace, caller_steps: bool, scaling: Scaling | None = None,
) -> CallProgram:  # fmt: skip
    """The program of calls with such operands, with caller steps or without."""
    # all but settings, with which a workspace forgets its programs; the dtype of x says that of w
    key = (
        build, plan, layout, caller_steps, x.shape, x.dtype, None if w is None else w.shape,
        bias is not None,
        None if scaling is None else (scaling.x.shape, scaling.w.shape, *scaling[2:]),
    )  # fmt: skip
    program = space.programs.get(key)
    if program is None:
        with space.guard(whole=True):  # the other ranks may be in this call already
            program = CallProgram(space, plan, x, w, bias, layout, caller_steps, scaling)
            space.programs[key] = program.built_by(build)
            if not program.follows:
                program.lists = by_c.of_torch_alone(program)
    return program


class InFlight:
    """A call that has begun: its first segment has been enqueued, by C if it has `_lists`, else by
    Python.
    """

    __slots__ = (
        "_at", "_elsewhere", "_given", "_lists", "calls", "engine", "program",
        "space", "stream", "tensors", "works",
    )  # fmt: skip

    def __init__(
        self, program: CallProgram, x: Tensor, w: Tensor | None, bias: Tensor | None,
        scaling: Scaling | None = None,
    ) -> None:  # fmt: skip
        space = program.space
        self.program, self.space, self.engine, self._at = program, space, space.engine, 0
        x_scale, w_scale = (None, None) if scaling is None else scaling[:2]
        self.tensors: list[Any] = [x, w, bias, x_scale, w_scale]
        self.calls: list[Call] = []
        self.works: list[Any] = []  # collectives that nobody has awaited (`overlap.collectives`)
        self._lists: Lists | None = program.lists
        try:
            if self._lists is None and self._may_be_listed():
                with active(space.device):
                    self._lists = by_c.lists_of(program, self.engine)
            if not self._begun_by_c():
                with space.guard():  # a channel may be open that is none of `calls` yet
                    self._begin()
            if not program.borrowed:
                self._end()
        except BaseException as error:
            self._fail(error)
            raise

    def _may_be_listed(self) -> bool:
        """To ask for captures gives a new thread its context, too."""
        return self.engine.runs_lists and not is_watched() and not capturing(self.space.device)

    def _begun_by_c(self) -> bool:
        """In the stream of the last call, with memory that is there; False, and nothing enqueued,
        where anything else must come first.
        """
        self.stream, self._elsewhere = self.engine.current(), False
        if self._lists is None or is_watched():
            return False
        if self.stream != self.engine._last and self.program.follows:
            return False
        channels = self.space.channels
        for wanted in self.program.channels:
            channel = channels.get(wanted.name)
            if channel is None or not channel.may_begin(wanted.size_bytes):
                return self._take_back()
            self.calls.append(channel.begin(False))
        self._make(self._lists.made)
        return self._by_c(self._lists) or self._take_back()

    def _fail(self, error: BaseException) -> None:
        is_open = any(call.channel.open for call in self.calls)
        stage = self.space.stage
        is_open = is_open or (stage is not None and stage.open is self)
        self.space.fail(error, is_open, half_made=not self.program.follows)

    def _take_back(self) -> bool:
        for call in self.calls:
            call.channel.take_back()
        self.calls.clear()
        del self.tensors[_MADE:]
        return False

    def _begin(self) -> None:
        program = self.program
        if program.follows:
            self.engine.follow()
        self.calls += [
            transfer.begin(self.space, one.name, one.size_bytes, one.kind)
            for one in program.channels
        ]
        # who has made x may use another stream
        self.stream, self._elsewhere = self.engine.current(), True
        captured = any(call.region.entries is not None for call in self.calls)
        if captured or is_watched():
            self._lists = None
        self._make(program.made if self._lists is None else self._lists.made, captured)
        if self._lists is None or not self._by_c(self._lists):
            self._lists = None
            self._by_python()

    def _make(self, made: Iterable[Made], captured: bool = False) -> None:
        """Take memory for what the call makes; then its registers are known. A call for which there
        is none is taken back, unless a capture has enqueued how it begins.
        """
        tensors, calls = self.tensors, self.calls
        new = tensors[0].new_empty
        try:
            tensors += [
                new(shape) if dtype is None else new(shape, dtype=dtype) for shape, dtype in made
            ]
        except BaseException:
            if not captured:
                self._take_back()
            raise
        if not self.program.follows:
            return  # nobody asks for a number
        table, epoch, second = b"", 0, 0
        if calls:
            table, epoch = calls[0].region.table, calls[0].epoch
        if len(calls) == 2:
            table, second = table + calls[1].region.table, calls[1].epoch
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        self._given = (table, self.stream, epoch, second, *addresses)

    # What the caller does.

    def complete(self) -> Tensor:
        """Go on to the next caller step; what the caller borrows there."""
        self._go_on()
        return self._borrowed()

    def finish(self) -> Any:
        """Go on to the end; the result."""
        program = self.program
        while self._at < len(program.borrowed):
            self._go_on()
        return None if program.y is None else self.tensors[program.y + _MADE]

    close = finish

    def borrow(self, consume: Callable[[Tensor], None]) -> None:
        """A caller step: `consume` enqueues its reads before it returns. An error of its own ends
        no group: the others get all that this call owes them, and its channel is closed.
        """
        try:
            consume(self._borrowed())
        except BaseException:
            self.finish()
            raise

    def _borrowed(self) -> Tensor:
        slot = self.program.borrowed[self._at]
        assert slot is not None, "nothing is borrowed in this step"
        return slot.of(self)

    def _go_on(self) -> None:
        """Enqueue the next segment, in whatever stream the caller is now."""
        try:
            self._at += 1
            if (stream := self.engine.current()) != self.stream:
                self.stream, self._elsewhere = stream, True
                if self.program.follows:
                    self._given = (self._given[0], stream, *self._given[2:])
                self.engine.hold(*self.tensors[_MADE:])
            if self._lists is not None:
                self._follow_others()
                self._by_c(self._lists)
            else:
                with active(self.space.device):  # C sets its own
                    if self.program.follows:
                        self.engine.follow()  # which knows of captures too
                    self._by_python()
            if self._at == len(self.program.borrowed):
                self._end()
        except BaseException as error:
            self._fail(error)
            raise

    def _end(self) -> None:
        if self._elsewhere:
            self.engine.hold(*[slot.of(self) for slot in self.program.held])
        for call in self.calls:
            self.space.end(call)
        for name in self._lists.launches if self._lists is not None else ():
            triton_launch.launches[name] += 1

    # The two back ends: each enqueues the segment that the call has come to.

    def _by_python(self) -> None:
        """A call that begins with a kernel for which the GPU has too little is taken back: nobody
        waits for it yet, and the other ranks, whose GPUs are alike, do the same.
        """
        enqueued = self._at > 0
        try:
            for name, steps in self.program.segment(self._at):
                with phase(name) if name else _UNNAMED:
                    for step in steps:
                        step.run(self)
                        enqueued = True
                        if isinstance(step, TorchCall):
                            self._follow_others()
        except triton_launch.OutOfResources:
            if not enqueued and not capturing(self.space.device):
                self._take_back()
            raise

    def _by_c(self, lists: Lists) -> bool:
        """False, and nothing enqueued, if C refuses how a call begins."""
        first, rest = lists.segments[self._at]
        if first is not None and not first(*self._given):
            return False
        for step, run in rest:
            step.run(self)
            self._follow_others()
            if run is not None:
                run(*self._given)
        return True

    def _follow_others(self) -> None:
        """Meanwhile another thread may have made a call."""
        if self.engine._last != self.stream and self.program.follows:
            self.engine.follow()

    # What the steps ask for.

    def number(self, operand: Operand) -> int:
        """The number that an operand names."""
        register, add = operand
        if register < TABLE:
            held: Any = self._given[register] if register else 0
            return int(held) + add
        for wanted, call in zip(self.program.channels, self.calls, strict=True):
            if register < wanted.first + wanted.words:
                return call.region.words[register - wanted.first] + add
        raise AssertionError(f"no channel has {operand}")


def whole(
    build: Builder, x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan,
    space: Workspace, consume: Callable[[Tensor], None] | None = None,
    scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """The result of a call. `consume` borrows the gathered rows of AG+GEMM."""
    borrows = consume is not None
    program = program_of(build, x, w, bias, layout, plan, space, borrows, scaling)
    call = InFlight(program, x, w, bias, scaling)
    if consume is not None:
        call.borrow(consume)
    return call.finish()


def start(
    build: Builder, x: Tensor, w: Tensor, layout: str, plan: Plan, space: Workspace,
    scaling: Scaling | None = None,
) -> InFlight:  # fmt: skip
    """A sum over the ranks in two steps: `finish` gives what `whole` does."""
    program = program_of(build, x, w, None, layout, plan, space, True, scaling)
    return InFlight(program, x, w, None, scaling)


def start_gather(
    build: Builder, x: Tensor, plan: Plan, space: Workspace, scaling: Scaling | None = None
) -> InFlight:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K], and behind these rows
    the scales of x, those of each rank behind the others', if there are any.
    """
    program = program_of(build, x, None, None, "", plan, space, True, scaling)
    return InFlight(program, x, None, None, scaling)
