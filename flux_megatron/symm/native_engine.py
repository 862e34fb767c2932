"""The copy engine of GPUs whose driver calls C makes: what one method enqueues is one call.

The order of the driver calls is that of `CudaCopyEngine`. A recording notes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from flux_megatron import settings
from flux_megatron.symm import enqueue
from flux_megatron.symm.copy_engine import CopyEngine, GatedPush, Push
from flux_megatron.symm.cuda_backend import CudaCopyEngine
from flux_megatron.symm.enqueue import (
    BATCH,
    COPY,
    COPY_ROWS,
    FOLLOW,
    RECORD,
    STREAM,
    WAIT,
    WRITE,
    Operation,
    Word,
    always,
)
from flux_megatron.symm.recording import EPOCH, this_thread

_SOURCE, _EPOCH = Word(2), Word(3)


class NativeCopyEngine(CudaCopyEngine):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._own = always(int(self._stream))
        self._recorded = always(int(self._event))
        a, b, c, d, e = (Word(register) for register in range(2, 7))
        self._order = self._listed(self._ordered(a, STREAM))
        self._copy = self._listed([Operation(COPY, STREAM, a, b, c)])
        self._copy_rows = self._listed(self._rows(a, b, c, d, e))
        self._write = self._listed([Operation(WRITE, STREAM, a, b)])
        self._wait = self._listed([Operation(WAIT, STREAM, a, b)])

    def _listed(self, operations: list[Operation]) -> Any:
        return enqueue.listed(operations, self.index)

    def _ordered(self, later: Word, earlier: Word) -> list[Operation]:
        return [
            Operation(RECORD, earlier, self._recorded),
            Operation(FOLLOW, later, self._recorded),
        ]

    def _note(self, *operations: Operation) -> None:
        """For the recording, if there is one."""
        if (recording := this_thread.recording) is not None:
            recording.operations += operations

    def order(self, later: int, earlier: int) -> None:
        self._order.run(earlier, later)
        if (recording := this_thread.recording) is not None:
            recording.refused = "the caller's stream changed"

    def fork(self) -> None:
        self._order.run(self.current(), self._own.add)
        if this_thread.recording is not None:
            self._note(*self._ordered(self._own, STREAM))

    def join(self) -> None:
        self._order.run(self._own.add, self.current())
        if this_thread.recording is not None:
            self._note(*self._ordered(STREAM, self._own))

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        self._copy.run(self._own.add, destination, source, size_bytes)
        self._note(self._copied(self._own, destination, source, size_bytes))

    def copy_rows(
        self, destination: int, source: int, size_bytes: int, rows: int, pitch_bytes: int
    ) -> None:
        self._copy_rows.run(self._own.add, destination, source, size_bytes, rows, pitch_bytes)
        known = always if (recording := this_thread.recording) is None else recording.address
        box = known(destination), known(source), always(size_bytes)
        self._note(*self._rows(*box, always(rows), always(pitch_bytes)))

    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        self._copy.run(self.current(), destination, source, size_bytes)
        self._note(self._copied(STREAM, destination, source, size_bytes))

    def _rows(self, to: Word, source: Word, size: Word, rows: Word, pitch: Word) -> list[Operation]:
        first = Operation(COPY_ROWS, self._own, to, source, size, size=1)
        return [first, Operation(COPY_ROWS, self._own, rows, pitch)]

    def _copied(self, stream: Word, destination: int, source: int, size_bytes: int) -> Operation:
        recording = this_thread.recording
        known = recording.address if recording is not None else always
        return Operation(COPY, stream, known(destination), known(source), always(size_bytes))

    def write(self, address: int, word: int) -> None:
        self._write.run(self._own.add, address, word)
        if (recording := this_thread.recording) is not None:
            recording.refused = "a word was written of which nobody knows whether it changes"

    def signal(self, address: int, epoch: int) -> None:
        self._write.run(self._own.add, address, epoch)
        self._note(Operation(WRITE, self._own, always(address), EPOCH))

    def wait_count(self, counter: int, count: int) -> None:
        self._wait.run(self._own.add, counter, count)
        self._note(Operation(WAIT, self._own, always(counter), always(count)))

    def clear(self, counters: tuple[int, ...]) -> None:
        operations = self._cleared(counters)
        self._listed(operations).run()
        self._note(*operations)

    def _cleared(self, counters: tuple[int, ...]) -> list[Operation]:
        writes = [Operation(WRITE, self._own, always(counter)) for counter in counters]
        return [Operation(BATCH, self._own, size=len(writes)), *writes]

    def send(self, pushes: Sequence[Push], source: int, epoch: int) -> None:
        self._listed(self._sent(pushes, _SOURCE, _EPOCH)).run(0, source, epoch)
        if (recording := this_thread.recording) is not None:
            self._note(*self._sent(pushes, recording.address(source), EPOCH))

    def _sent(self, pushes: Sequence[Push], source: Word, epoch: Word) -> list[Operation]:
        operations = []
        for push in pushes:
            operations += [*self._pushed(push, source), self._signalled(push, epoch)]
        return operations

    def _pushed(self, push: Push, source: Word) -> list[Operation]:
        given = always(push.destination), source.plus(push.offset), always(push.size_bytes)
        if push.rows == 1:
            return [Operation(COPY, self._own, *given)]
        return self._rows(*given, always(push.rows), always(push.pitch_bytes))

    def _signalled(self, push: Push, epoch: Word) -> Operation:
        return Operation(WRITE, self._own, always(push.signal), epoch)

    def push_gated(self, gated_pushes: tuple[GatedPush, ...], source: int, epoch: int) -> None:
        self._listed(self._gated(gated_pushes, _SOURCE, _EPOCH)).run(0, source, epoch)
        if (recording := this_thread.recording) is not None:
            self._note(*self._gated(gated_pushes, recording.address(source), EPOCH))

    def _gated(
        self, gated_pushes: tuple[GatedPush, ...], source: Word, epoch: Word
    ) -> list[Operation]:
        """One batch has a signal and what follows it: the next wait, or the zeros."""
        waits = [
            Operation(WAIT, self._own, always(gated.counter), always(gated.tiles))  # wait [D]
            for gated in gated_pushes
        ]
        _, *zeros = self._cleared(tuple(gated.counter for gated in gated_pushes))
        operations = waits[:1]
        for number, gated in enumerate(gated_pushes, 1):
            after = waits[number : number + 1] or zeros
            operations += [
                *self._pushed(gated.push, source),
                Operation(BATCH, self._own, size=1 + len(after)),
                self._signalled(gated.push, epoch),
                *after,
            ]
        return operations


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why C cannot make the driver calls, or None."""
    try:
        enqueue.native()
    except Exception as error:  # a compiler that is not there, or whatever it raises
        return f"{type(error).__name__}: {error}"
    return None


def engine(device: torch.device) -> CopyEngine:
    """The copy engine of a GPU: this one where it is wanted and there is a C compiler."""
    if not settings.get().native:
        return CudaCopyEngine(device)
    if reason := unavailable():
        warnings.warn(
            f"flux_megatron: Python makes the driver calls, which takes the host longer: {reason}",
            stacklevel=2,
        )
        return CudaCopyEngine(device)
    return NativeCopyEngine(device)
