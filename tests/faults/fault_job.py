"""A training job whose processes are forked from this one, which has imported all they need.

On GPUs ranks are started anew: CUDA cannot be forked.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_processes import forked, forked_rank

ROOT = Path(__file__).parents[2]
POLL_S = 0.01


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
        self.pid = forked(
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
    from flux_megatron.lab.train import launcher, rank_process
    from flux_megatron.lab.train.config import ConfigError

    start = forked_rank if config.parallel.device == "cpu" else _anew

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


def _anew(arguments, environment, log, descriptors, plant) -> subprocess.Popen:
    code = "import pickle, sys, os; sys.path[:0] = {path!r}"
    code += "; from flux_megatron.lab.train import worker"
    code += "; pickle.loads({plant!r})(int(os.environ['RANK'])); sys.exit(worker.main())"
    program = code.format(
        path=[str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/faults")], plant=pickle.dumps(plant)
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stdin=subprocess.DEVNULL,
        stdout=log, stderr=log, pass_fds=descriptors, start_new_session=True,
    )  # fmt: skip


def _nothing(rank: int) -> None: ...
