"""Calls of one kind after the first few: native calls enqueue what a strategy has enqueued before.

A strategy that is `RECORDABLE` enqueues by the copy engine, by our launchers and by `by_torch`. One
call of each parity is recorded while the strategy makes it, and gives a list of driver calls, or
several with functions of torch's between them. Later calls run these with their addresses and their
epoch. Whatever a list cannot do leaves the call to the strategy: a capture, another stream than
that of the last call, an open call, a channel that has grown, addresses that are no multiples of 16
bytes, a profiler, settings that look for bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from flux_megatron import settings
from flux_megatron.kernels import triton_launch
from flux_megatron.symm.channel import REFRESH_EVERY, Channel, Region
from flux_megatron.symm.native_engine import NativeCopyEngine
from flux_megatron.symm.recording import Launch, Recording, Steps, noted
from flux_megatron.symm.workspace import Workspace

_Same = Callable[[Tensor], Tensor]
_ATTEMPTS = 8  # recordings of a kind that may fail, such as while its kernels are compiled


class Steady:
    """The lists of a kind of call: those that agree in all that a decision depends on, and in
    whether they have a bias. `channel` is the one that the strategy uses.
    """

    def __init__(self, space: Workspace, channel: str, recordable: bool) -> None:
        self._space, self._name = space, channel
        self._engine = space.engine
        now = settings.get()  # a decision belongs to its settings
        recordable = recordable and isinstance(space.engine, NativeCopyEngine)
        self._attempts = 0 if not recordable or now.nvtx or now.record_waits else _ATTEMPTS
        self._poison = now.poison
        self._channel: Channel | None = None
        self._regions: tuple[Region, ...] = ()  # to which the lists belong
        self._steps: list[Steps | None] = [None, None]  # by the parity of the epoch
        # shapes of what a call makes, and dtypes that are not x's
        self._made: list[tuple[tuple[int, ...], torch.dtype | None]] = []
        self._result = 0  # which of them is y
        self._launches: tuple[str, ...] = ()
        self.refused = ""  # why the last recording was of no use

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
        """y, or None for a call that the strategy must make."""
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
        registers = (
            stream, epoch, x.data_ptr(), w.data_ptr(), biased, *[one.data_ptr() for one in made]
        )  # fmt: skip
        channel.open = True
        try:
            ran = steps.first(*registers)
            if ran:
                channel.epoch = epoch
                if steps.rest:
                    self._go_on(steps, registers, (x, w, bias, *made))
            channel.open = False
        except BaseException as error:  # an interrupt too: nobody knows what has been enqueued
            self._space.break_off(error)
            raise
        if not ran:
            return None
        if self._poison:
            channel.poison(self._regions[epoch & 1])
        for name in self._launches:
            triton_launch.launches[name] += 1
        return made[self._result]

    def _go_on(self, steps: Steps, registers: tuple[int, ...], tensors: tuple[Any, ...]) -> None:
        """What comes behind the first list."""
        operands, engine = steps.operands_of(tensors), self._engine
        for (function, which), run in steps.rest:
            function(*[operands[number] for number in which])
            if engine._last != registers[0]:  # another thread has made a call meanwhile
                engine.follow()
            if run is not None:
                run(*registers)

    def recorded(self, x: Tensor, w: Tensor, bias: Tensor | None) -> _Recorded | nullcontext[_Same]:
        """`with steady.recorded(x, w, bias) as made: return made(y)` around a call that the
        strategy makes: recorded if that may give a list that is missing.
        """
        return _Recorded(self, x, w, bias) if self._may_record() else _UNRECORDED

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

    def keep(self, recording: Recording, y: Tensor) -> None:
        channel = self._space.channels[self._name]
        if not self._is_of(channel):
            self._channel, self._regions, self._steps = channel, channel._regions, [None, None]
        try:
            steps, self._result = recording.steps(), recording.place_of(y)
        except Exception as error:  # what the driver or Triton has otherwise than we know it
            self.refused, self._attempts = str(error), self._attempts - 1
            return
        self._steps[channel.epoch & 1] = steps
        self._made = [
            (tuple(one.shape), None if one.dtype is y.dtype else one.dtype)
            for one in recording.made
        ]
        launched = (one for one in recording.operations if isinstance(one, Launch))
        self._launches = tuple(one.name for one in launched)


class _Recorded:
    """A call that is being recorded; called with its result, which it gives."""

    def __init__(self, steady: Steady, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
        self._steady, self._recording = steady, Recording(x, w, bias)
        self._noted = noted(self._recording)

    def __enter__(self) -> _Recorded:
        self._noted.__enter__()
        return self

    def __call__(self, y: Tensor) -> Tensor:
        self._steady.keep(self._recording, y)
        return y

    def __exit__(self, *raised: Any) -> None:
        self._noted.__exit__(*raised)


def _same(y: Tensor) -> Tensor:
    return y


_UNRECORDED: nullcontext[_Same] = nullcontext(_same)


def _watched() -> bool:
    """Whether somebody wants to see the phases or the launches of a call."""
    return profiler._is_profiler_enabled or triton_launch.has_hooks()
