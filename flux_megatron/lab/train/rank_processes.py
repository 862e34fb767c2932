"""The processes of a run: watched, stopped, and by what each of them ended.

A rank's own waits are bounded. What a rank cannot end by itself is ended here: it is stopped, or
does not come to its end after another has.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flux_megatron.errors import RunFailed
from flux_megatron.lab.train import run_folder
from flux_megatron.lab.train.config import ConfigError
from flux_megatron.lab.train.rank_process import INTERRUPTED, RankProcess

POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks to report their errors, after one has failed
STOP_GRACE_S = 30.0  # for the other ranks to end, after a requested stop ended one
TRACE_S = 0.2  # for a rank that is ended to write down where it stands


class RankFailure(RunFailed):
    """A rank ended by itself, or had to be ended; the message has the first error, in one line."""


class RankTraceback(Exception):
    """The cause of a `RankFailure` or `ConfigError`: what the first rank that failed has sent."""


class RankProcesses:
    """A context: all ranks are started at its beginning and gone at its end.

    `bound_s` is how long a rank may wait for another; `job` as of a `RankProcess`.
    """

    def __init__(
        self, world_size: int, out: Path, environment: dict[str, str], job: list[str],
        store: socket.socket, bound_s: float,
    ) -> None:  # fmt: skip
        self.logs, self.bound_s, self.stops_asked = out / "logs", bound_s, 0
        self.ranks: list[RankProcess] = []
        try:
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise run_folder.unwritable(out, error) from None
        for rank in range(world_size):
            self._error_file(rank).unlink(missing_ok=True)
            log = self.logs / f"rank_{rank}.log"
            self.ranks.append(RankProcess(rank, out, log, environment, job, store))

    def __enter__(self) -> RankProcesses:
        self.signals = contextlib.ExitStack()
        self.signals.enter_context(_handled(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()
        self.signals.close()

    def wait(self) -> int:
        """Until all ranks have ended or are given up: 0, or 130 after a request to stop.

        `RankFailure` if a rank failed; then each rank has an error in logs/rank_N.error.
        """
        forwarded, reason = False, ""
        while not reason and any(rank.code is None for rank in self.ranks):
            time.sleep(POLL_S)
            if self.stops_asked > 1:
                return INTERRUPTED
            if self.stops_asked and not forwarded:
                forwarded = True
                self._ask_to_stop()
            for rank in self.ranks:
                rank.look()
            reason = self._given_up()
        codes = [rank.code for rank in self.ranks]
        if self.stops_asked or set(codes) == {INTERRUPTED}:
            return INTERRUPTED if reason or any(codes) else 0
        if reason or any(codes):
            raise self._failure(reason)
        return 0

    def _on_signal(self, *_: object) -> None:
        self.stops_asked += 1  # acted on in wait(): a handler may interrupt anything

    def _ask_to_stop(self) -> None:
        print("\nstopping after this step; once more to kill", file=sys.stderr, flush=True)
        for rank in self.ranks:
            rank.signal(signal.SIGTERM)

    def _given_up(self) -> str:
        """Why the ranks that have not ended are not waited for any longer, or nothing."""
        now = time.monotonic()
        left = [rank for rank in self.ranks if rank.code is None]
        grace = STOP_GRACE_S if self.stops_asked else GRACE_S
        for rank in self.ranks:
            if rank.code not in (None, 0):
                only_stopped = all(other.stopped_at for other in left)
                if only_stopped or now - rank.ended_at > grace:
                    return f"rank_{rank.rank} had failed"
            elif rank.code == 0 and now - rank.ended_at > self.bound_s + grace:
                return f"rank_{rank.rank} had ended {self.bound_s + grace:g} s before"
            elif rank.stopped_at and now - rank.stopped_at > self.bound_s + grace:
                return f"rank_{rank.rank} had been stopped for {self.bound_s + grace:g} s"
        return ""

    def _failure(self, reason: str) -> Exception:
        """End what is left; every rank's error becomes its file, the first one the message."""
        left = [rank for rank in self.ranks if rank.code is None]
        for rank in left:
            rank.signal(signal.SIGUSR1)
        time.sleep(TRACE_S if left else 0)
        facts = [fact for rank in self.ranks if (fact := rank.fact())]
        reported = sorted(
            (rank for rank in self.ranks if rank.raised), key=lambda rank: rank.raised["at_ns"]
        )
        first = reported[0] if reported else None
        said = f"rank_{first.rank} failed: {_words(first.raised)}" if first else ""
        kept = self._keep_errors(reason, facts[0] if facts else said or reason)
        words = "; ".join(filter(None, [*facts, said])) or reason
        failure: Exception = RankFailure(f"{words} (more in {self.logs})" if kept else words)
        if first is None:
            return failure
        if first.raised["input"] and not facts:
            failure = ConfigError(first.raised["message"])
        failure.__cause__ = RankTraceback(f"of rank_{first.rank}:\n{first.error}")
        return failure

    def _keep_errors(self, reason: str, cause: str) -> bool:
        """Whether every rank's error is in its file: a full disk must not hide the first one."""
        try:
            for rank in self.ranks:
                text = rank.error or rank.fact()
                if rank.code is None:
                    text = text or f"rank_{rank.rank} was running"
                    text += f"; it was ended, because {reason}: {cause}"
                elif not text:
                    text = f"rank_{rank.rank} had ended by itself: {cause}"
                self._error_file(rank.rank).write_text(text.strip() + "\n")
        except OSError:
            return False
        return True

    def _error_file(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.error"


def _words(raised: dict[str, Any]) -> str:
    return f"{raised['type']}: {raised['message']}" if raised["message"] else raised["type"]


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks all ranks to end after this step, the second kills."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
