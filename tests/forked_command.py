"""The command line in a fork of this process, and its ranks in forks of that one: none imports."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
IMPORTED = (  # what a rank of `flux-megatron train` and `generate` imports
    "flux_megatron.cli", "flux_megatron.lab.train.loop", "flux_megatron.lab.generate.decode",
    "flux_megatron.nn.functions", "flux_megatron.overlap.pipelined", "torch._dynamo",
    "torch.distributed.launcher.api", "matplotlib.backends.backend_agg", "scipy.sparse",
)  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36


class Command:
    """`flux-megatron WORDS`, running. `plant(rank)` is called in each rank before anything."""

    def __init__(
        self, words: list[str], folder: Path, plant: Callable[[int], object] = str,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        for module in IMPORTED:
            importlib.import_module(module)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._before = folder, children()
        for old in folder.glob("rank_*"):
            old.unlink()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what it leaves is a child of ours
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(words, folder, plant, os.environ | (environment or {}))

    @property
    def output(self) -> str:
        return (self._folder / "output").read_text()

    def rank(self, number: int) -> int:
        """The process of a rank, waiting until there is one."""
        file = self._folder / f"rank_{number}"
        wait_for(lambda: file.exists() and file.read_text(), self)
        return int(file.read_text())

    def ends(self, limit_s: float = 120) -> int:
        """Its exit code, or minus the signal that ended it. It leaves no process behind."""
        wait_for(
            lambda: os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT),
            self,
            limit_s,
        )
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline = time.monotonic() + 10
        while (left := children() - self._before) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert not left, f"processes left behind: {left}\n{self.output}"
        return code


def flux_megatron(
    folder: Path, *words: object, expected: int = 0, plant: Callable[[int], object] = str,
    environment: dict[str, str] | None = None,
) -> str:  # fmt: skip
    """The output of a command that ends with the `expected` code."""
    command = Command([*map(str, words)], folder, plant, environment)
    code = command.ends()
    assert code == expected, f"exit code {code}\n{command.output}"
    return command.output


def wait_for(condition: Callable[[], object], command: Command, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s\n{command.output}"
        time.sleep(0.01)


def children() -> set[int]:
    """This process's children that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        state, parent, threads = fields[0], int(fields[1]), int(fields[17])
        ended = state == "Z" and threads == 1  # the first thread may end before the others
        if not ended and parent == os.getpid():
            found.add(int(path.parent.name))
    return found


def _become(
    words: list[str], folder: Path, plant: Callable[[int], object], environment: dict[str, str]
) -> None:
    """The process of a command: a session, streams and settings of its own. Never returns."""
    from flux_megatron import __main__, settings
    from flux_megatron.lab.train import ranks

    os.setsid()
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    os.environ.update(environment)
    settings.reload()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    as_rank = ranks.as_rank

    def planted(*given: object) -> object:
        rank = int(os.environ["RANK"])
        (folder / f"rank_{rank}").write_text(str(os.getpid()))
        plant(rank)
        return as_rank(*given)

    ranks.START_METHOD, ranks.as_rank = "fork", planted
    sys.argv = ["flux-megatron", *words]
    code = 1
    try:
        code = __main__.main() or 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)
