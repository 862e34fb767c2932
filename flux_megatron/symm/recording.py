"""What one call enqueues, noted while it is enqueued, as a list for the calls after it.

A call that is recorded runs as every call does: the copy engine and the launches note each driver
call here, in their order. Addresses within operands become words of the list. What cannot be a
word of it, such as a kernel of torch's, may not happen while a call is recorded; a strategy that
says it is `RECORDABLE` has none.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor

from flux_megatron.symm import enqueue
from flux_megatron.symm.enqueue import Operation, Word

# the registers behind that of the stream; from `_MADE` on what the call has made
X, W, EPOCH, BIAS = (Word(register) for register in range(2, 6))
_MADE = 6


class Unrecordable(Exception):
    """Why a recording is of no use. No caller sees it: the strategy goes on making the calls."""


class Launch(NamedTuple):
    """A kernel, as `List.launch` of enqueue.c takes it behind the stream; `name` is for counts."""

    name: str
    arguments: tuple[Any, ...]


class Recording:
    """`operations` so far, and what the call has `made`; `refused` says why it is of no use."""

    def __init__(self, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
        self.operations: list[Operation | Launch] = []
        self.made: list[Tensor] = []
        self.refused = ""
        self.x = x
        self._thread = threading.get_ident()
        self._ranges: list[tuple[int, int, Word]] = []
        for tensor, word in ((x, X), (w, W), (bias, BIAS)):
            if tensor is not None:
                self._add(tensor, word)

    def _add(self, tensor: Tensor, word: Word) -> None:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        if any(begin < other_end and other < end for other, other_end, _ in self._ranges):
            self.refused = "its operands share memory"
        self._ranges.append((begin, end, word))

    def mine(self) -> bool:
        """Whether the thread is that of the call."""
        return threading.get_ident() == self._thread

    def take(self, tensor: Tensor) -> None:
        """A tensor that the call has just made. It lives until the recording ends, so no other has
        its memory.
        """
        self._add(tensor, Word(_MADE + len(self.made)))
        self.made.append(tensor)

    def address(self, address: int) -> Word:
        """The word of an address: within an operand, or one that never changes."""
        for begin, end, word in self._ranges:
            if begin <= address < end:
                return word.plus(address - begin)
        return enqueue.always(address)

    def place_of(self, y: Tensor) -> int:
        """Which of those that the call has `made` is its result."""
        places = [place for place, one in enumerate(self.made) if one is y]
        if not places:
            raise Unrecordable("the call's result is not one that it has made")
        return places[0]

    def listed(self) -> Any:
        """The list; its registers are the stream, x, w, the epoch, the bias or 0, and what is
        `made`. It runs outside of captures only, and with whole 16-byte addresses.
        """
        if self.refused:
            raise Unrecordable(self.refused)
        made = enqueue.native().List()
        for one in self.operations:
            if isinstance(one, Launch):
                made.launch(enqueue.STREAM, *one.arguments)
            else:
                made.add(one.kind, one.size, one.stream, one.a, one.b, one.c)
        registers = [X.register, W.register, BIAS.register, *range(_MADE, _MADE + len(self.made))]
        made.require(True, sum(1 << register for register in registers))
        return made
