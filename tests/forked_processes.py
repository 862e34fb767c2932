"""Processes that begin as forks of this one, which has imported all they need.

`kept` runs a function in a process that inherits whatever its jobs leave behind, so that orphans
are its children.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
IMPORTED = (  # what a rank of `flux-megatron train` imports
    "flux_megatron.lab.train.launcher", "flux_megatron.lab.train.worker",
    "flux_megatron.lab.train.loop", "flux_megatron.lab.train.rank_states",
    "flux_megatron.nn.functions",
    "flux_megatron.overlap.pipelined", "torch._dynamo", "torch.distributed.checkpoint",
    "matplotlib.backends.backend_agg", "rich.live",
)  # fmt: skip


def import_what_ranks_import() -> None:
    for module in IMPORTED:
        importlib.import_module(module)


def kept(body: Callable[..., Any], *arguments: object) -> Any:
    """`body(*arguments)` in a forked keeper of processes; what it returns, or its exception."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        try:
            answer = (True, body(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        for child in children():
            os.kill(child, signal.SIGKILL)
        with os.fdopen(write, "wb") as stream:
            pickle.dump(answer, stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        content = stream.read()
    os.waitpid(pid, 0)
    good, value = pickle.loads(content)
    assert good, value
    return value


def children() -> list[int]:
    """This process's children that have not ended."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _stat(pid)[1] == str(os.getpid()) and _stat(pid)[0] != "Z"]


def ending(pid: int) -> bool:
    """Whether a process has called exit, or is gone: no signal reaches it any more."""
    return _stat(pid)[0] == "Z" or bool(int(_stat(pid)[6]) & _PF_EXITING)


def _stat(pid: int) -> list[str]:
    """State, parent, group, ... of a process, as proc(5) lists them after its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", *["0"] * 5]


class _Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def forked_rank(
    arguments: list[str], environment: dict[str, str], log: int, descriptors: list[int],
    plant: Callable[[int], None],
) -> _Forked:  # fmt: skip
    """In place of `rank_process.start`: a rank in which `plant(rank)` runs before anything."""

    def rank() -> int:
        from flux_megatron.lab.train import worker

        plant(int(os.environ["RANK"]))
        return worker.main(arguments)

    pid = forked(rank, environment, log, descriptors)
    while os.getsid(pid) != pid:  # as after Popen: whatever comes now meets a session of its own
        time.sleep(0.001)
    return _Forked(pid)


def forked(
    body: Callable[[], int], environment: dict[str, str], log: Path | int,
    descriptors: list[int] | None = None,
) -> int:  # fmt: skip
    """The process of `body`, as if it had been started: a session, streams and settings of its own.

    It has no descriptors but `descriptors`; None leaves those of this process.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        opened = (
            log if isinstance(log, int) else os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        )
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, opened), (2, opened)):
            os.dup2(source, stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115, it lasts as long as the process
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        if descriptors is not None:
            _close_all_but({0, 1, 2, *descriptors})
        importlib.reload(warnings).simplefilter("default")  # pytest keeps them to itself
        os.environ.clear()
        os.environ.update(environment)
        from flux_megatron import settings

        settings.reload()
        torch.set_num_threads(1)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def command_line(
    words: list[str], plant: Callable[[int], None], log: Path
) -> tuple[int, str, list[int]]:
    """Of `flux-megatron WORDS`: its exit code and output, and the processes left behind.

    `plant(rank)` runs in each rank before anything. For `kept`.
    """
    pid = forked(partial(_command_line, words, plant), dict(os.environ), log)
    deadline = time.monotonic() + 200
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, f"no end within 200 s\n{log.read_text()}"
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1]), log.read_text(), children()


def _command_line(words: list[str], plant: Callable[[int], None]) -> int:
    from flux_megatron import cli
    from flux_megatron.lab.train import rank_process

    rank_process.start = partial(forked_rank, plant=plant)
    os.chdir(ROOT)
    sys.argv = ["flux-megatron", *words]
    try:
        cli.app()
    except SystemExit as end:
        return end.code or 0
    return 0


def _close_all_but(kept_open: set[int]) -> None:
    """Their numbers stay taken: objects that this process has inherited will close them again."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {nothing, *kept_open}:
            os.dup2(nothing, int(name))
