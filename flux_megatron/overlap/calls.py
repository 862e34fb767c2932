"""Calls by their programs (`symm.program`), which C or Python runs.

C runs the lists of a program (`overlap.lists`). Python runs the same steps one by one: on CPU, in a
capture, for a profiler, NVTX or hooks of Triton, before kernels are compiled, at addresses that are
no multiples of 16 bytes, and where there is no C compiler or FLUX_MEGATRON_NATIVE=0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from flux_megatron import settings
from flux_megatron.kernels import triton_launch
from flux_megatron.overlap import transfer
from flux_megatron.overlap.lists import Lists, Made, lists_of
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Plan
from flux_megatron.scaling import Scaling
from flux_megatron.symm.device import capturing
from flux_megatron.symm.enqueue import MADE, TABLE, Operand, X
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.program_steps import Torch
from flux_megatron.symm.space import Workspace

_UNNAMED = nullcontext()
_MADE = MADE - X.register  # the place of the first tensor that a call makes, behind its operands


def is_watched() -> bool:
    """Whether somebody wants to see the phases or the launches of a call."""
    if profiler._is_profiler_enabled or triton_launch.has_hooks():
        return True
    return settings.get().nvtx


def program_of(
    build: Builder, x: Tensor, w: Tensor | None, bias: Tensor | None, layout: str, plan: Plan,
    space: Workspace, turns: bool, scaling: Scaling | None = None,
) -> CallProgram:  # fmt: skip
    """The program of calls with such operands, with the caller's turns or without."""
    w_shape = () if w is None else w.shape
    scaled = None if scaling is None else scaling[2:]
    key = (build, turns, layout, id(plan), *x.shape, x.dtype, *w_shape, bias is None, scaled)
    program = space.programs.get(key)
    if program is None:
        # it keeps the plan: no other has its identity as long as it is here
        program = CallProgram(space, plan, x, w, bias, layout, turns, scaling).built_by(build)
        space.programs[key] = program
    return program


def result_of(
    program: CallProgram, x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling | None
) -> Tensor:
    """Of a whole call, which mostly is one list."""
    if program.lists is not None and program.lists.single is not None:
        y = _at_once(program, x, w, bias, scaling)
        if y is not None:
            return y
    return InFlight(program, x, w, bias, scaling).finish()


def _at_once(
    program: CallProgram, x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling | None
) -> Tensor | None:
    """What `InFlight` does, for a call that is one list in one channel, in half of the host's time;
    None, and nothing enqueued, where that would not begin at once.
    """
    lists, space = program.lists, program.space
    run, name, size_bytes = lists.single
    engine, channel = space.engine, space.channels.get(name)
    if (stream := engine.current()) != engine._last or is_watched():
        return None
    if channel is None or not channel.may_begin(size_bytes):
        return None
    epoch, region = channel.begin_eager()
    try:
        new = x.new_empty
        made = [
            new(shape) if dtype is None else new(shape, dtype=dtype) for shape, dtype in lists.made
        ]
        addresses = [one.data_ptr() for one in made]
        given = (
            x.data_ptr(), w.data_ptr(), 0 if bias is None else bias.data_ptr(),
            *((0, 0) if scaling is None else (scaling.x.data_ptr(), scaling.w.data_ptr())),
        )  # fmt: skip
    except BaseException:  # no memory: nothing has been enqueued
        channel.take_back()
        raise
    try:
        if not run(region.table, stream, epoch, 0, *given, *addresses):
            channel.take_back()
            return None
    except BaseException as error:
        space.break_off(error)
        raise
    channel.end_in(region)
    counts = triton_launch.launches
    for name in lists.launches:
        counts[name] += 1
    assert program.y is not None, "a gather is no whole call"
    return made[program.y]


class InFlight:
    """A call that has begun: its first segment has been enqueued."""

    __slots__ = (
        "_at", "_elsewhere", "_given", "_lists", "calls", "engine", "program",
        "space", "stream", "tensors",
    )  # fmt: skip

    def __init__(
        self, program: CallProgram, x: Tensor, w: Tensor | None, bias: Tensor | None,
        scaling: Scaling | None = None,
    ) -> None:  # fmt: skip
        space = program.space
        self.program, self.space, self.engine, self._at = program, space, space.engine, 0
        self.tensors: list[Any] = [x, w, bias, *(scaling[:2] if scaling else (None, None))]
        self._lists: Lists | None = program.lists
        if self._lists is None or not self._begun_at_once(self._lists):
            with space.guard():
                self._begin()
        if not program.lent:
            self._end()

    def _begun_at_once(self, lists: Lists) -> bool:
        """By C, in the stream of the last call; False, and nothing enqueued, for other calls."""
        self.stream, self._elsewhere = self.engine.current(), False
        if self.stream != self.engine._last or is_watched():
            return False
        self.calls, channels = [], self.space.channels
        for wanted in self.program.channels:
            channel = channels.get(wanted.name)
            if channel is None or not channel.may_begin(wanted.size_bytes):
                return self._take_back()
            self.calls.append(channel.begin(False))
        self._make(lists.made)
        try:
            return self._by_c(lists) or self._take_back()
        except BaseException as error:
            self.space.break_off(error)
            raise

    def _take_back(self) -> bool:
        for call in self.calls:
            call.channel.take_back()
        del self.tensors[_MADE:]
        return False

    def _begin(self) -> None:
        self.calls = [
            transfer.begin(self.space, one.name, one.size_bytes, one.kind)
            for one in self.program.channels
        ]
        # who has made x may use another stream
        self.stream, self._elsewhere = self.engine.current(), True
        captured = any(call.region.entries is not None for call in self.calls)
        self._make(self.program.made, captured)
        if not captured and self.engine.runs_lists and not is_watched():
            self._lists = lists_of(self.program, self.engine, self.number)
            if self._lists is not None:
                self._make(self._lists.made[len(self.program.made) :])
                if self._by_c(self._lists):
                    return
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
        table, epoch, second = calls[0].region.table, calls[0].epoch, 0
        if len(calls) == 2:
            table, second = table + calls[1].region.table, calls[1].epoch
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        self._given = (table, self.stream, epoch, second, *addresses)

    # What the caller does.

    def complete(self) -> Tensor:
        """Go on to the caller's next turn, who borrows this."""
        self._go_on()
        return self._lent()

    def finish(self) -> Any:
        """Go on to the end; the result."""
        program = self.program
        while self._at < len(program.lent):
            self._go_on()
        return None if program.y is None else self.tensors[program.y + _MADE]

    close = finish

    def lend(self, consume: Callable[[Tensor], None]) -> None:
        """The caller's turn: he enqueues his reads before he returns. An error of his ends no
        group: the others get all that this call owes them, and its channel is closed.
        """
        try:
            consume(self._lent())
        except BaseException:
            self.finish()
            raise

    def _lent(self) -> Tensor:
        slot = self.program.lent[self._at]
        assert slot is not None, "this turn lends nothing"
        return slot.of(self)

    def _go_on(self) -> None:
        """Enqueue the next segment, in whatever stream the caller is now."""
        try:
            self._at += 1
            if (stream := self.engine.current()) != self.stream:
                self.stream, self._elsewhere = stream, True
                self._given = (self._given[0], stream, *self._given[2:])
                self.engine.hold(*self.tensors[_MADE:])
            if self._lists is None:
                self.engine.follow()
                self._by_python()
            else:
                self._follow_others()
                self._by_c(self._lists)
            if self._at == len(self.program.lent):
                self._end()
        except BaseException as error:
            self.space.break_off(error)
            raise

    def _end(self) -> None:
        if self._elsewhere:
            self.engine.hold(*[slot.of(self) for slot in self.program.held])
        if self._lists is None:
            for call in self.calls:
                self.space.end(call)
            return
        for call in self.calls:
            call.channel.end_in(call.region)
        for name in self._lists.launches:
            triton_launch.launches[name] += 1

    # The two executors of a segment.

    def _by_python(self) -> None:
        """A call that begins with a kernel for which the GPU has too little is taken back: nobody
        waits for it yet, and the other ranks, whose GPUs are alike, do the same.
        """
        enqueued = self._at > 0
        try:
            for name, steps in self.program.steps(self._at):
                with phase(name) if name else _UNNAMED:
                    for step in steps:
                        step.run(self)
                        enqueued = True
                        if isinstance(step, Torch):
                            self._follow_others()
        except triton_launch.OutOfResources:
            if not enqueued and not capturing(self.space.device):
                self._take_back()
            raise

    def _by_c(self, lists: Lists) -> bool:
        """False, and nothing enqueued, if the first list of a call refuses."""
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
        if self.engine._last != self.stream:
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


def gathering(build: Builder) -> Callable[..., Tensor]:
    """`ag_gemm` of a strategy; the program's only turn, if there is one, lends the rows."""

    def ag_gemm(
        x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
        consume: Callable[[Tensor], None] | None, scaling: Scaling | None = None,
    ) -> Tensor:  # fmt: skip
        """all_gather(x) @ w + bias; `consume` borrows the gathered rows."""
        turns = consume is not None
        program = program_of(build, x, w, bias, layout, plan, workspace, turns, scaling)
        if consume is None:
            return result_of(program, x, w, bias, scaling)
        call = InFlight(program, x, w, bias, scaling)
        call.lend(consume)
        return call.finish()

    return ag_gemm


def reducing(build: Builder) -> tuple[Callable[..., Tensor], Callable[..., InFlight]]:
    """`gemm_rs` and `start_gemm_rs` of a strategy, or `gemm_ar` and `start_gemm_ar`."""

    def whole(
        x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
        scaling: Scaling | None = None,
    ) -> Tensor:  # fmt: skip
        """x @ w, summed over the ranks: y, or this rank's rows of it."""
        program = program_of(build, x, w, None, layout, plan, workspace, False, scaling)
        return result_of(program, x, w, None, scaling)

    def start(
        x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
        scaling: Scaling | None = None,
    ) -> InFlight:  # fmt: skip
        """The same in two steps: `finish` gives y."""
        program = program_of(build, x, w, None, layout, plan, workspace, True, scaling)
        return InFlight(program, x, w, None, scaling)

    return whole, start


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> InFlight:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    program = program_of(transfer.gather_rows, x, None, None, "", plan, workspace, turns=True)
    return InFlight(program, x, None, None)


def start_gather_beside(x: Tensor, scaling: Scaling | None, space: Workspace) -> InFlight:
    """The same while other calls are open; behind the rows `complete` gives the scales of x, those
    of each rank behind the others', if there are any.
    """
    program = program_of(transfer.gather_beside, x, None, None, "", _BESIDE, space, True, scaling)
    return InFlight(program, x, None, None, scaling)


_BESIDE = Plan("pipelined")  # one object: programs are found by it
