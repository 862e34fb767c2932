"""Strands of a schedule: bodies on parked threads, of which only one runs at a time.

A strand that pauses hands over to the next one itself, without a thread of the scheduler in
between, and goes on at once if it is the next. All of them run on one CPU: two CPUs that wake each
other would spend twice the time.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memory_checker import AddressChecker

if TYPE_CHECKING:
    from virtual_ranks import Scheduler


class _Abort(BaseException):
    """Ends the strands of a run that is over."""


class Strand:
    """A body on a parked thread. `ready` is what it waits for, if anything, `why` its words."""

    def __init__(
        self, rank: int, name: str, body: Callable[[], None], *,
        ready: Callable[[], bool] | None = None, why: str = "",
    ) -> None:  # fmt: skip
        self.rank, self.name, self._body, self.ready, self.why = rank, name, body, ready, why
        self.done = False
        self._relay: Relay | None = None
        # of a CTA: the grid, its place there, and the memory that it may touch
        self.grid: tuple[int, ...] | None = None
        self.place: tuple[int, ...] = ()
        self.checker: AddressChecker | None = None
        # the CTA that a warp belongs to, its warps that have not ended, and a warp's own copies
        self.cta, self.children, self.state = self, [], None

    def live(self) -> list[Strand]:
        """Itself and its warps, without those that have ended."""
        return [strand for strand in (self, *self.children) if not strand.done]

    @property
    def runnable(self) -> bool:
        return self.ready is None or self.ready()

    def pause(self, ready: Callable[[], bool] | None = None, why: str = "") -> None:
        """Let others run; come back when `ready`. Called on the strand's own thread."""
        assert self._relay is not None, "a strand pauses that does not run"
        self.ready, self.why = ready, why
        if not self._relay.over and self._relay.hand_over() is not self:
            self._go.acquire()
        if self._relay.over:
            raise _Abort
        self.ready = None

    def go(self, relay: Relay) -> None:
        """Start it, or wake it up. Called by the strand before it, which then parks or ends."""
        if self._relay is None:
            self._relay, self._go = relay, _closed()
            _thread.start_new_thread(self._main, ())
        else:
            self._go.release()

    def abort(self) -> None:
        """End its thread, if it has one, when all is over."""
        if self._relay is not None and not self.done:
            self._go.release()
            self._relay.aborted.acquire()

    def _main(self) -> None:
        relay, failure = self._relay, None
        try:
            self._body()
        except _Abort:
            pass
        except BaseException as error:
            failure = error
        self.done = True
        if relay.over:
            relay.aborted.release()
        elif failure is not None:
            relay.finish(failure)
        else:
            relay.turns.ended(self)
            relay.hand_over()


class Relay:
    """From one strand to the next, until none is left or one fails."""

    def __init__(self, turns: Scheduler) -> None:
        self.turns, self.over = turns, False
        self.aborted, self._finished = _closed(), _closed()
        self._failure: BaseException | None = None
        self._running: Strand | None = None

    def run(self) -> None:
        """Until the last strand has ended. Raises what one has raised, or `turns`."""
        with _one_cpu():
            self.hand_over()
            self._finished.acquire()
        if self._failure is not None:
            raise self._failure

    def hand_over(self) -> Strand | None:
        """Wake the next strand; if that is the one which runs already, there is nothing to do."""
        try:
            strand = self.turns.next()
        except BaseException as error:
            self.finish(error)
            return None
        if strand is None:
            self.finish(None)
        elif strand is not self._running or strand.done:
            self._running = strand
            strand.go(self)
        return strand

    def finish(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._finished.release()


def _closed() -> _thread.LockType:
    """A lock that one thread opens for another, who closes it again; cheaper than a semaphore."""
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


@contextmanager
def _one_cpu() -> Iterator[None]:
    """Of this thread and those that start from it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
