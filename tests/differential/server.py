"""A process that has imported one Megatron-LM checkout, and forks the ranks of many runs from it.

    python server.py CHECKOUT SCRIPT [te]

Reads one run per line as JSON, answers each with a line. To import Megatron takes longer than to
train five iterations of a tiny model. torch.distributed starts in the children alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE_S = 3.0  # for the other ranks, once one has failed
DUMP_S = 1.0  # for a rank that hangs to write where it stands


@dataclass(frozen=True)
class Run:
    """One run of the script: its arguments, its ranks, and the folder that each rank leaves
    RANK.log and RANK.pt in.
    """

    arguments: list[str]
    ranks: int
    folder: str
    limit_s: float


@dataclass
class End:
    """How a run ended. `codes` are exit statuses, negative for signals; None: never started."""

    codes: list[int] = field(default_factory=list)
    hung: bool = False

    @property
    def good(self) -> bool:
        return not self.hung and not any(self.codes)


class Server:
    """The other end: a client of one such process."""

    def __init__(
        self, checkout: Path, script: str, site: Path | None = None, te: bool = False
    ) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(checkout), script, *["te"] * te],
            env=environment(checkout, site), stdin=pipe, stdout=pipe, text=True,
        )  # fmt: skip
        if self._answer() != "ready":
            raise RuntimeError(f"{checkout}: the server did not start")

    def run(self, run: Run) -> End:
        Path(run.folder).mkdir(parents=True)
        assert self._process.stdin is not None
        print(json.dumps(asdict(run)), file=self._process.stdin, flush=True)
        return End(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {self._process.wait()}")
        return json.loads(line)


def environment(checkout: Path, site: Path | None) -> dict[str, str]:
    """Of a process that imports this checkout, and has no GPU."""
    from flux_megatron.launch import CPU, ONE_QUEUE

    return {
        **os.environ, **CPU, **ONE_QUEUE, "PYTHONPATH": path_of(checkout, site),
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_ALGO": "Ring",  # for --deterministic-mode
    }  # fmt: skip


def path_of(checkout: Path, site: Path | None) -> str:
    """Where such a process finds modules."""
    path = [str(checkout), str(ROOT), str(site or ""), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, path))


def serve(checkout: str, script: str, te: str = "") -> None:
    """The process itself; `te`: with TransformerEngine's classes stood in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints while it is imported
    os.chdir(checkout)
    import rank

    rank.prepare(script, bool(te))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        end = fork_ranks(Run(**json.loads(line)), functools.partial(rank.main, script))
        print(json.dumps(asdict(end)), file=answers, flush=True)


def fork_ranks(run: Run, body: Any) -> End:
    """Fork the ranks, wait for them, and end them when one failed or the time is over."""
    port, deadline = _free_port(), time.monotonic() + run.limit_s
    running = {_forked(run, number, port, body): number for number in range(run.ranks)}
    end = End(codes=[0] * run.ranks)
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
            continue
        code = end.codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if code:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    end.hung = bool(running) and not any(end.codes)
    if end.hung:
        for pid in running:
            os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stack
        time.sleep(DUMP_S)
    for pid, number in running.items():
        os.kill(pid, signal.SIGKILL)
        end.codes[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return end


def _forked(run: Run, number: int, port: int, body: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {
            "RANK": str(number), "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(run.ranks), "LOCAL_WORLD_SIZE": str(run.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        log = os.open(f"{run.folder}/{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(file, place)
        code = body(run, number)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _free_port() -> int:
    """Below those that Linux gives to connections, which a rank's store may need a second later."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    serve(*sys.argv[1:])
