"""What bounds a stream's waits for signals in a mailbox: a thread that ends those that are late.

The driver's wait has no deadline. But the signals lie in the host's memory, so the host sees which
are missing, and can write them in a peer's place. Kernels that wait for the same data have their
own bounds; with CUDA_DEVICE_MAX_CONNECTIONS=1 they may stand behind the stream. Replays of a graph
are bounded by those kernels, and their streams by this thread, when the kernels have given up.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache

from flux_megatron.symm import signals
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.status import Status

LOOK_S = 0.25

_lock = threading.Lock()  # of what is watched, and of each look
_watched: set[Awaited] = set()


class Awaited:
    """What the calls of a channel await in its mailbox, until `forget`. `words` has a pad."""

    def __init__(self, rank: int, pads: SymmetricBuffer, words: int, status: Status) -> None:
        self._pads, self._words, self._status = pads, words, status
        self._box = (ctypes.c_int32 * (2 * words)).from_address(pads.own.data_ptr())
        # the slot of this rank's own signals, which nobody writes in a mailbox
        self.begun = signals.slot(rank, 0)
        # of eager calls that may wait: the epoch, the slots, the bound in seconds
        self._calls: deque[tuple[int, Sequence[int], float]] = deque()
        self._last = 0  # epoch of them
        self._since_s = 0.0  # when the first of them was seen to have begun

    def expect(self, epoch: int, slots: Sequence[int], bound_s: float) -> None:
        """An eager call awaits these slots, from when `begun` holds its epoch."""
        self._last = epoch
        self._calls.append((epoch, slots, bound_s))

    def look(self) -> None:
        """End the waits if the first call's are late, or the group's have given up."""
        while self._calls and self._missing() is None:
            self._calls.popleft()
            self._since_s = 0.0
        if self._calls and signals.reached(self._box[self.begun], self._calls[0][0]):
            self._since_s = self._since_s or time.monotonic()
            slot, (epoch, _, bound_s) = self._missing(), self._calls[0]
            if slot is not None and time.monotonic() - self._since_s > bound_s:
                self._status.report_late(self._pads.own, slot, epoch, self._box[slot])
        if self._status.tripped:
            self.end()

    def _missing(self) -> int | None:
        """A slot that the first call awaits."""
        epoch, slots, _ = self._calls[0]
        for slot in slots:
            if not signals.reached(self._box[slot], epoch):
                return slot
        return None

    def end(self) -> None:
        """All waits so far. Replays reset what is written, so it is written at each look."""
        for slot in range(self._words):
            self._box[slot] = signals.as_int32(self._last)
            self._box[self._words + slot] = signals.CAPTURED_EPOCH


def watch(awaited: Awaited) -> None:
    with _lock:
        _watched.add(awaited)
    _thread(os.getpid())


def forget(awaited: Awaited) -> None:
    """Nobody uses the channel any more: what still waits ends, or its memory could not go."""
    with _lock:
        _watched.discard(awaited)
        awaited.end()


@cache
def _thread(process: int) -> None:
    threading.Thread(target=_look_on, daemon=True).start()


def _look_on() -> None:
    while True:
        time.sleep(LOOK_S)
        _look()  # which keeps no memory beyond it


def _look() -> None:
    with _lock:
        for awaited in _watched:
            awaited.look()
