"""One rank's process, as its parent sees it: running, stopped or ended, and the error it sent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flux_megatron.errors import BadInput

INTERRUPTED = 130
_PIPE_BYTES = 60_000  # of an error: what a pipe holds although nobody reads yet
_LINE = 4_000  # characters of its message


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
    def raised(self) -> dict[str, Any]:
        """Of its error: `at_ns`, by the clock that all processes share, `type`, `message` in one
        line, and whether it is bad `input`. Empty without one.
        """
        found: dict[str, Any] = json.loads(self._received.partition(b"\n")[0] or "{}")
        return found

    def fact(self) -> str:
        """How it ended, as its parent sees it, or nothing."""
        name = f"rank_{self.rank}"
        if self.code is None:
            return f"{name} is stopped (process {self._process.pid})" if self.stopped_at else ""
        if self.code < 0:
            return f"{name} was killed by {signal.Signals(-self.code).name}"
        if self.code in (0, INTERRUPTED) or self._received:
            return ""
        last = (self.log.read_text(errors="replace").strip().splitlines() or ["it is empty"])[-1]
        return f"{name} ended with code {self.code}; the end of {self.log}: {last}"

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


def send_error(pipe: int, error: BaseException) -> None:
    """In the rank: the error that it handles to its parent, the end of it where it is long."""
    head = {
        "at_ns": time.monotonic_ns(),
        "type": type(error).__name__,
        "message": " ".join(str(error).split())[:_LINE],
        "input": isinstance(error, BadInput),
    }
    text = traceback.format_exc().encode(errors="replace")[-_PIPE_BYTES + 2 * _LINE :]
    os.write(pipe, json.dumps(head).encode() + b"\n" + text)


def start(
    arguments: list[str], environment: dict[str, str], log: int, descriptors: list[int]
) -> subprocess.Popen[bytes]:
    """The process of a rank, `arguments` being those of `worker`."""
    return subprocess.Popen(
        [sys.executable, "-m", "flux_megatron.lab.train.worker", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        start_new_session=True,
    )
