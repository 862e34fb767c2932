"""Calls of one kind after the first few: native calls enqueue what a strategy has enqueued before.

A strategy that is `RECORDABLE` enqueues by the copy engine, by our launchers and by `by_torch`. One
call of each parity is recorded while the strategy makes it, and gives a list of driver calls, or
several with functions of torch's between them. Later calls run these with their addresses and their
epoch. Whatever a list cannot do leaves the call to the strategy: a capture, another stream than
that of the last call, an open call, a channel that has grown, addresses that are no multiples of 16
bytes, a profiler, settings that look for bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from flux_megatron import settings
from flux_megatron.kernels import triton_launch
from flux_megatron.overlap.pieces import Begun, InPieces, NotedPieces
from flux_megatron.symm.channel import REFRESH_EVERY, Channel, Region
from flux_megatron.symm.native_engine import NativeCopyEngine
from flux_megatron.symm.recording import Launch, Recording, Steps, noted
from flux_megatron.symm.workspace import Workspace

_Same = Callable[[Tensor], Tensor]
_ATTEMPTS = 8  # recordings of a kind that may fail, such as while its kernels are compiled


class Steady:
    """The lists of a kind of call: those that agree in all that a decision depends on, and in what
    `dispatch.Kinds` tells apart. `channel` is the one that the strategy uses.
    """

    def __init__(self, space: Workspace, channel: str, recordable: bool) -> None:
        self._space, self._name = space, channel
        self._engine = space.engine
        now = settings.get()  # a decision belongs to its settings
        recordable = recordable and isinstance(space.engine, NativeCopyEngine)
        self._attempts = 0 if not recordable or now.nvtx else _ATTEMPTS
        self._poison = now.poison
        self._channel: Channel | None = None
        self._regions: tuple[Region, ...] = ()  # to which the lists belong
        self._steps: list[Steps | None] = [None, None]  # by the parity of the epoch
        # shapes of what a call makes, and dtypes that are not x's
        self._made: list[tuple[tuple[int, ...], torch.dtype | None]] = []
        self._result = 0  # which of them is y
        self._x: tuple[torch.Size, torch.dtype] | None = None  # of the call that was recorded
        self._launches: tuple[str, ...] = ()
        self.refused = ""  # why the last recording was of no use

    def run(
        self, x: Tensor, w: Tensor, bias: Tensor | None,
        consume: Callable[[Tensor], None] | None = None, scales: Sequence[Tensor] = (),
    ) -> Tensor | None:  # fmt: skip
        """y, or None for a call that the strategy must make. `consume` gets what was lent. `scales`
        are those of x and w in FP8.
        """
        begun = self.begun(x, w, bias, scales)
        if begun is None:
            return None
        if begun[1].rest:
            try:
                for lent in self.going_on(begun, x, w, bias, scales):
                    assert consume is not None, "a call that lends nothing has no such stop"
                    consume(lent)
            except BaseException as error:
                self.break_off(error)
                raise
        return self.ended(begun)

    def begun(
        self, x: Tensor, w: Tensor, bias: Tensor | None, scales: Sequence[Tensor] = ()
    ) -> Begun | None:
        """A call whose first list has run; None, and nothing enqueued, for one that the strategy
        must make.
        """
        channel = self._channel
        if channel is None or channel.open or channel._regions is not self._regions:
            return None
        epoch = channel.epoch + 1
        steps, engine = self._steps[epoch & 1], self._engine
        stream = engine.current()
        if steps is None or stream != engine._last or not epoch % REFRESH_EVERY or _watched():
            return None
        new = x.new_empty
        made = [
            new(shape) if dtype is None else new(shape, dtype=dtype) for shape, dtype in self._made
        ]
        biased = 0 if bias is None else bias.data_ptr()
        of_x, of_w = [scale.data_ptr() for scale in scales] or (0, 0)
        registers = (
            stream, epoch, x.data_ptr(), w.data_ptr(), biased, of_x, of_w,
            *[one.data_ptr() for one in made],
        )  # fmt: skip
        channel.open = True
        try:
            if not steps.first(*registers):
                channel.open = False
                return None
        except BaseException as error:
            self.break_off(error)
            raise
        channel.epoch = epoch
        return epoch, steps, registers, made

    def going_on(
        self, begun: Begun, x: Tensor, w: Tensor, bias: Tensor | None, scales: Sequence[Tensor] = ()
    ) -> Iterator[Any]:
        """What comes behind the first list. Wherever it is the caller's turn, this yields what the
        caller is lent, None for nothing.
        """
        _, steps, registers, made = begun
        tensors = (x, w, bias, *(scales or (None, None)), *made)
        operands, engine = steps.operands_of(tensors), self._engine
        for (function, which), run in steps.rest:
            given = [operands[number] for number in which]
            if function is not None:
                function(*given)
            else:
                yield given[0] if given else None
                if (stream := engine.current()) != registers[0]:
                    registers = (stream, *registers[1:])
                    _used_here(made)
            if engine._last != registers[0]:  # the caller, or another thread, has made a call
                engine.follow()
            if run is not None:
                run(*registers)

    def ended(self, begun: Begun) -> Tensor | None:
        """The result of a call, behind its last list."""
        epoch, _, _, made = begun
        assert self._channel is not None
        self._channel.open = False
        if self._poison:
            self._channel.poison(self._regions[epoch & 1])
        for name in self._launches:
            triton_launch.launches[name] += 1
        return made[self._result] if made else None

    def break_off(self, error: BaseException) -> None:
        """An interrupt too: nobody knows what has been enqueued. The call stays open."""
        self._space.break_off(error)

    def started(self, x: Tensor, w: Tensor, start: Callable[[], Any]) -> Any:
        """A call in pieces: `start()` of the strategy, or what stands for its result."""
        if self._x == (x.shape, x.dtype) and (begun := self.begun(x, w, None)) is not None:
            return InPieces(self, begun, x, w)
        if not self._may_record():
            return start()
        recording = Recording(x, w, None)
        with noted(recording):
            return NotedPieces(self, recording, start())

    def recorded(
        self, x: Tensor, w: Tensor, bias: Tensor | None, scales: Sequence[Tensor] = ()
    ) -> _Recorded | nullcontext[_Same]:
        """`with steady.recorded(x, w, bias) as made: return made(y)` around a call that the
        strategy makes: recorded if that may give a list that is missing.
        """
        return _Recorded(self, Recording(x, w, bias, scales)) if self._may_record() else _UNRECORDED

    def _may_record(self) -> bool:
        """Whether the next call is one that a list could make, but for the list."""
        if not self._attempts or _watched():
            return False
        channel = self._space.channels.get(self._name)
        if channel is None or channel.open or self._engine.capture(self._engine.current()):
            return False
        return not self._is_of(channel) or self._steps[(channel.epoch + 1) & 1] is None

    def _is_of(self, channel: Channel) -> bool:
        return self._channel is channel and self._regions is channel._regions

    def keep(self, recording: Recording, y: Tensor | None) -> None:
        """The lists of a call that has made y, or nothing."""
        channel, engine = self._space.channels[self._name], self._engine
        assert isinstance(engine, NativeCopyEngine), f"{type(engine)} recorded a call"
        if not self._is_of(channel):
            self._channel, self._regions, self._steps = channel, channel._regions, [None, None]
        try:
            steps = recording.steps(engine.index)
            self._result = 0 if y is None else recording.place_of(y)
        except Exception as error:  # what the driver or Triton has otherwise than we know it
            self.refused, self._attempts = str(error), self._attempts - 1
            return
        self._steps[channel.epoch & 1] = steps
        x = recording.x
        self._x = x.shape, x.dtype
        self._made = [
            (tuple(one.shape), None if one.dtype is x.dtype else one.dtype)
            for one in recording.made
        ]
        launched = (one for one in recording.operations if isinstance(one, Launch))
        self._launches = tuple(one.name for one in launched)


class _Recorded:
    """A call that is being recorded; called with its result, which it gives."""

    def __init__(self, steady: Steady, recording: Recording) -> None:
        self._steady, self._recording = steady, recording
        self._noted = noted(self._recording)

    def __enter__(self) -> _Recorded:
        self._noted.__enter__()
        return self

    def __call__(self, y: Tensor) -> Tensor:
        self._steady.keep(self._recording, y)
        return y

    def __exit__(self, *raised: Any) -> None:
        self._noted.__exit__(*raised)


def _used_here(made: list[Tensor]) -> None:
    """The memory is the stream's in which the call began; the current one uses it too."""
    for one in made:
        one.record_stream(torch.cuda.current_stream(one.device))


def _same(y: Tensor) -> Tensor:
    return y


_UNRECORDED: nullcontext[_Same] = nullcontext(_same)


def _watched() -> bool:
    """Whether somebody wants to see the phases or the launches of a call."""
    return profiler._is_profiler_enabled or triton_launch.has_hooks()
