"""The ranks of a measurement on this machine: started together, gone together, one line of error.

A rank is a process in a session of its own, so that Ctrl-C reaches only the parent. The kernel ends
it with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import IO, Any

from flux_megatron.errors import RunFailed

INTERRUPTED = 130
GRACE_S = 3.0  # for the other ranks to end by themselves after one has failed
POLL_S = 0.05
START_S = 120.0  # from the first rank's start to the last one's
STORE = "FLUX_BENCH_STORE_FD"  # rank 0's variable has the socket that its key-value store serves
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run(arguments: Sequence[str], world_size: int, environment: Mapping[str, str]) -> None:
    """Python with `arguments` as every rank of this machine, until all have ended.

    `RunFailed` names the first rank that failed, and its error; `KeyboardInterrupt` passes.
    """
    with ExitStack() as stack:
        interrupted = stack.enter_context(_interrupts_noted())
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        ranks: list[_Rank] = []
        for rank in range(world_size):
            # rank 0 speaks to the terminal; of another rank only its error is shown
            log = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            variables = {**environment, **address, **size}
            ranks.append(_Rank(rank, arguments, variables, listener, log))
            stack.callback(ranks[-1].kill)
        _wait(ranks, interrupted)


class _Rank:
    def __init__(
        self, rank: int, arguments: Sequence[str], environment: Mapping[str, str],
        listener: socket.socket, log: IO[bytes] | None,
    ) -> None:  # fmt: skip
        self.rank, self._log = rank, log
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        passed = () if rank else (listener.fileno(),)
        own[STORE] = "".join(map(str, passed))
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def failure(self) -> str:
        """How it ended; rank 0 has said its error itself."""
        code = self.code or 0
        if code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-code).name}"
        if self._log is None:
            return f"rank {self.rank} failed"
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip() or f"rank {self.rank} failed"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has come: noted alone, for `_wait` to raise between two polls.

    CPython raises between any two bytecodes: also where `Popen.poll` has taken a lock and not yet
    begun the `try` that gives it back. Then `kill` would wait for that lock without an end.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a shell's `&` has it ignored
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(ranks: Sequence[_Rank], interrupted: Callable[[], bool]) -> None:
    first, since = None, 0.0
    while any(rank.code is None for rank in ranks):
        if interrupted():
            raise KeyboardInterrupt
        if first is None:
            first = next((rank for rank in ranks if rank.code), None)
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:
            break
        time.sleep(POLL_S)
    if first := first or next((rank for rank in ranks if rank.code), None):
        raise RunFailed(first.failure())


def rendezvous() -> dict[str, Any]:
    """Arguments of `init_process_group` for a rank that `run` has started; none under torchrun."""
    if STORE not in os.environ:
        return {}
    from torch.distributed import TCPStore

    listener = os.environ[STORE]
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=bool(listener),
        master_listen_fd=int(listener) if listener else None,
        wait_for_workers=False,
        timeout=timedelta(seconds=START_S),
    )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": store, "rank": rank, "world_size": world_size}
