"""A training job whose processes are forked from this one, which has imported all they need.

`kept` runs a function in a process that inherits whatever the job leaves behind, so that orphans
are its children. On GPUs ranks are started anew: CUDA cannot be forked.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4


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


class Job:
    """`flux-megatron train` of `config` in `out`, its launcher a child of this process.

    `plant(rank)` runs in every rank before it does anything; `label` tells jobs of a folder apart.
    """

    def __init__(
        self, config: Any, out: Path, resume: bool = False,
        plant: Callable[[int], None] | None = None, environment: dict[str, str] | None = None,
        label: str = "",
    ) -> None:  # fmt: skip
        self.out, self.code, self.started = out, None, time.monotonic()
        self.output_file = out.with_name(f"{out.name}{label}.output")
        self.pids = out.with_name(f"{out.name}{label}.pids")
        self.pids.mkdir(exist_ok=True)
        for old in self.pids.iterdir():
            old.unlink()
        self.pid = _forked(
            lambda: _launch(config, out, resume, plant or _nothing, self.pids),
            os.environ | (environment or {}),
            self.output_file,
        )

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def rank(self, number: int) -> int:
        """The process of a rank, waiting until there is one."""
        file = self.pids / str(number)
        while not (file.exists() and file.read_text()):
            assert self.running(), self.output
            time.sleep(POLL_S)
        return int(file.read_text())

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def wait(self, limit_s: float) -> bool:
        """Whether the launcher ends within the limit."""
        deadline = time.monotonic() + limit_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.code is not None

    def error(self, rank: int) -> str:
        file = self.out / "logs" / f"rank_{rank}.error"
        return file.read_text() if file.exists() else ""


def _launch(config, out, resume, plant, pids) -> int:
    from flux_megatron.train import launcher, rank_process
    from flux_megatron.train.config import ConfigError

    start = _forking if config.parallel.device == "cpu" else _anew

    def started(arguments, environment, log, descriptors):
        process = start(arguments, environment, log, descriptors, plant)
        (pids / environment["RANK"]).write_text(str(process.pid))
        return process

    rank_process.start = started
    try:
        return launcher.train(config, out, resume)
    except launcher.RankFailure as failure:
        print(failure, flush=True)
        return 1
    except ConfigError as error:
        print(error, flush=True)
        return 2


class _Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _forking(arguments, environment, log, descriptors, plant) -> _Forked:
    def rank() -> int:
        from flux_megatron.train import worker

        plant(int(os.environ["RANK"]))
        return worker.main(arguments)

    pid = _forked(rank, environment, log, descriptors)
    while os.getsid(pid) != pid:  # as after Popen: whatever comes now meets a session of its own
        time.sleep(0.001)
    return _Forked(pid)


def _anew(arguments, environment, log, descriptors, plant) -> subprocess.Popen:
    code = "import pickle, sys, os; sys.path[:0] = {path!r}; from flux_megatron.train import worker"
    code += "; pickle.loads({plant!r})(int(os.environ['RANK'])); sys.exit(worker.main())"
    program = code.format(path=[str(ROOT), str(ROOT / "tests/faults")], plant=pickle.dumps(plant))
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stdin=subprocess.DEVNULL,
        stdout=log, stderr=log, pass_fds=descriptors, start_new_session=True,
    )  # fmt: skip


def _forked(
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


def _close_all_but(kept_open: set[int]) -> None:
    """Their numbers stay taken: objects that this process has inherited will close them again."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {nothing, *kept_open}:
            os.dup2(nothing, int(name))


def _nothing(rank: int) -> None: ...
