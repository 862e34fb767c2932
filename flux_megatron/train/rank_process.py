"""One rank's process, as its parent sees it: running, stopped or ended, and the error it sent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

INTERRUPTED = 130
_PIPE_BYTES = 60_000  # of an error: what a pipe holds although nobody reads yet


class RankProcess:
    """A process in a session of its own, so that a terminal's Ctrl-C reaches only the parent.

    Its error comes through a pipe, which also works on a full disk. `code` is None until the
    process has ended, then its exit code, or minus the signal that killed it. `job` are the
    arguments of `worker` that say what it does.
    """

    def __init__(
        self, rank: int, out: Path, log: Path, environment: dict[str, str], job: list[str],
        store: socket.socket,
    ) -> None:  # fmt: skip
        self.rank, self.log = rank, log
        self.code: int | None = None
        self.stopped_at = self.ended_at = 0.0
        self._received = b""
        self._pipe, errors = os.pipe()
        os.set_blocking(self._pipe, False)
        passed = {"errors": errors}
        if rank == 0:
            passed |= {"store": store.fileno(), "display": os.dup(sys.stdout.fileno())}
        arguments = [str(out), f"--parent={os.getpid()}", *job]
        arguments += [f"--{name}={value}" for name, value in passed.items()]
        with log.open("ab") as stream:
            self._process = start(
                arguments,
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stream.fileno(),
                [*passed.values()],
            )
        os.close(errors)
        if rank == 0:
            os.close(passed["display"])

    def look(self) -> None:
        """Update its state. An ended process keeps its number until `kill`."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, _PIPE_BYTES):
                self._received += data
        if self.code is not None:
            return
        flags = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        state = os.waitid(os.P_PID, self._process.pid, flags)
        if state is None:
            self.stopped_at = 0.0
        elif state.si_code == os.CLD_STOPPED:
            self.stopped_at = self.stopped_at or time.monotonic()
        else:
            killed = state.si_code != os.CLD_EXITED
            self.code = -state.si_status if killed else state.si_status
            self.ended_at = time.monotonic()

    @property
    def error(self) -> str:
        """The traceback that it has sent, or nothing."""
        return self._received.partition(b"\n")[2].decode(errors="replace")

    @property
    def error_at_ns(self) -> int:
        """When it sent `error`, by the clock that all processes share."""
        return int(self._received.partition(b"\n")[0] or 0)

    def fact(self) -> str:
        """How it ended, as its parent sees it, or nothing."""
        name = f"rank_{self.rank}"
        if self.code is None:
            return f"{name} is stopped (process {self._process.pid})" if self.stopped_at else ""
        if self.code < 0:
            return f"{name} was killed by {signal.Signals(-self.code).name}"
        if self.code in (0, INTERRUPTED) or self._received:
            return ""
        end = self.log.read_text(errors="replace")[-2000:]
        return f"{name} ended with code {self.code}; the end of its log:\n{end}"

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End every process of its session, those of a rank that has ended included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """After `kill`: until the process is gone."""
        self._process.wait()
        os.close(self._pipe)


def send_error(pipe: int, text: str) -> None:
    """In the rank: its error to its parent, the end of it where it is long."""
    head = f"{time.monotonic_ns()}\n".encode()
    os.write(pipe, head + text.encode(errors="replace")[-_PIPE_BYTES:])


def start(
    arguments: list[str], environment: dict[str, str], log: int, descriptors: list[int]
) -> subprocess.Popen[bytes]:
    """The process of a rank, `arguments` being those of `worker`."""
    return subprocess.Popen(
        [sys.executable, "-m", "flux_megatron.train.worker", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        start_new_session=True,
    )
