"""What one call enqueues, noted while it is enqueued, as lists for the calls after it.

A call that is recorded runs as every call does: the copy engine and the launches note each driver
call here, in their order. Addresses within operands become words of a list. A kernel of torch's
cannot be in a list: `by_torch` notes its function and its operands, so one list ends before it and
another begins behind it. A strategy that says it is `RECORDABLE` enqueues nothing in other ways.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from flux_megatron.symm import enqueue
from flux_megatron.symm.enqueue import Operation, Word

# The registers behind that of the stream; from `_MADE` on what the call has made. From `X` on they
# are addresses of the call's tensors, in the order of their places.
EPOCH, X, W, BIAS, X_SCALE, W_SCALE = (Word(register) for register in range(2, 8))
_MADE = 8


class Unrecordable(Exception):
    """Why a recording is of no use. No caller sees it: the strategy goes on making the calls."""


class Launch(NamedTuple):
    """A kernel, as `List.launch` of enqueue.c takes it behind the stream; `name` is for counts."""

    name: str
    arguments: tuple[Any, ...]


class View(NamedTuple):
    """The tensor at a `place` of a call, or a part of it, `offset` elements behind its first."""

    place: int
    size: tuple[int, ...] = ()  # empty for the whole tensor
    stride: tuple[int, ...] = ()
    offset: int = 0

    def of(self, tensors: Sequence[Any]) -> Tensor:
        whole: Tensor = tensors[self.place]
        if not self.size:
            return whole
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Stop(NamedTuple):
    """A function between two lists, and which `operands` it takes, by their numbers. None: it is
    the caller's turn, who is lent them.
    """

    function: Callable[..., object] | None
    operands: tuple[int, ...]


_Run = Callable[..., bool]


class Steps(NamedTuple):
    """A call: `first` begins it, or refuses to and enqueues nothing. `rest` are the stops, each
    with the list behind it, None for an empty one.
    """

    first: _Run
    rest: tuple[tuple[Stop, _Run | None], ...]
    operands: tuple[View | Tensor, ...]  # a tensor never moves

    def operands_of(self, tensors: Sequence[Any]) -> list[Tensor]:
        """For a call with these: x, w, its bias and scales or None, and what it makes."""
        return [one.of(tensors) if isinstance(one, View) else one for one in self.operands]


class Recording:
    """`operations` so far, and what the call has `made`; `refused` says why it is of no use."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, scales: Sequence[Tensor] = ()
    ) -> None:
        self.operations: list[Operation | Launch | Stop] = []
        self.made: list[Tensor] = []
        self.refused = ""
        self.x = x
        self._operands: list[View | Tensor] = []  # of stops
        self._ranges: list[tuple[int, int, Word, Tensor]] = []
        x_scale, w_scale = scales or (None, None)
        words = ((x, X), (w, W), (bias, BIAS), (x_scale, X_SCALE), (w_scale, W_SCALE))
        for tensor, word in words:
            if tensor is not None:
                self._add(tensor, word)

    def _add(self, tensor: Tensor, word: Word) -> None:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        if any(begin < other_end and other < end for other, other_end, *_ in self._ranges):
            self.refused = "its operands share memory"
        self._ranges.append((begin, end, word, tensor))

    def take(self, tensor: Tensor) -> None:
        """A tensor that the call has just made. It lives until the recording ends, so no other has
        its memory.
        """
        self._add(tensor, Word(_MADE + len(self.made)))
        self.made.append(tensor)

    def address(self, address: int) -> Word:
        """The word of an address: within an operand, or one that never changes."""
        for begin, end, word, _ in self._ranges:
            if begin <= address < end:
                return word.plus(address - begin)
        return enqueue.always(address)

    def stop(self, function: Callable[..., object] | None, tensors: tuple[Tensor, ...]) -> None:
        """A function of torch's that the call has just called, or None: the caller's turn."""
        self.operations.append(Stop(function, tuple(self._number(one) for one in tensors)))

    def _number(self, tensor: Tensor) -> int:
        """Which operand of stops a tensor is."""
        operand = self._operand(tensor)
        for number, other in enumerate(self._operands):
            if isinstance(other, View) and other == operand:
                return number
        self._operands.append(operand)
        return len(self._operands) - 1

    def _operand(self, tensor: Tensor) -> View | Tensor:
        """A view of one of the call's tensors, or the tensor itself: it never moves."""
        address = tensor.data_ptr()
        for begin, end, word, whole in self._ranges:
            if begin <= address < end:
                place = word.register - X.register
                offset, rest = divmod(address - begin, whole.itemsize)
                if rest or tensor.dtype != whole.dtype:
                    self.refused = f"{tensor.dtype} given within a tensor of {whole.dtype}"
                if (tensor.shape, tensor.stride(), offset) == (whole.shape, whole.stride(), 0):
                    return View(place)
                return View(place, tuple(tensor.shape), tensor.stride(), offset)
        return tensor

    def place_of(self, y: Tensor) -> int:
        """Which of those that the call has `made` is its result."""
        places = [place for place, one in enumerate(self.made) if one is y]
        if not places:
            raise Unrecordable("the call's result is not one that it has made")
        return places[0]

    def steps(self, device: int) -> Steps:
        """The lists for the streams of a device, by its number; their registers are the stream, the
        epoch, x, w, the bias and scales or 0, and what is `made`. They run outside of captures
        only, and with whole 16-byte addresses but for scales.
        """
        if self.refused:
            raise Unrecordable(self.refused)
        lists, stops = [enqueue.native().List(device)], []
        for one in self.operations:
            if isinstance(one, Launch):
                lists[-1].launch(enqueue.STREAM, *one.arguments)
            elif isinstance(one, Operation):
                lists[-1].add(one.kind, one.size, one.stream, one.a, one.b, one.c)
            else:
                stops.append(one)
                lists.append(enqueue.native().List(device))
        registers = [X.register, W.register, BIAS.register, *range(_MADE, _MADE + len(self.made))]
        # the others go on, whatever the first has found
        lists[0].require(True, sum(1 << register for register in registers))
        behind = [one.run if len(one) else None for one in lists[1:]]
        rest = tuple(zip(stops, behind, strict=True))
        return Steps(lists[0].run, rest, tuple(self._operands))


class _Noting(threading.local):
    """What notes the call that this thread makes, if anything does."""

    recording: Recording | None = None


this_thread = _Noting()


@contextmanager
def noted(recording: Recording | None) -> Iterator[None]:
    """What this thread enqueues inside is noted; with None it is not."""
    before, this_thread.recording = this_thread.recording, recording
    try:
        yield
    finally:
        this_thread.recording = before


def by_torch(function: Callable[..., object], *tensors: Tensor) -> None:
    """`function(*tensors)`, whose kernels are torch's. What is no operand of the call, nor made by
    it, may not move: it belongs to a region.
    """
    function(*tensors)
    if (recording := this_thread.recording) is not None:
        recording.stop(function, tensors)


def lend(consume: Callable[[Tensor], None], rows: Tensor) -> None:
    """`consume(rows)`, the caller's turn: a recording has nothing of what happens inside."""
    if (recording := this_thread.recording) is None:
        consume(rows)
        return
    with noted(None):
        consume(rows)
    recording.stop(None, (rows,))
