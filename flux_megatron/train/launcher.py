"""The parent of a run: starts one process per rank, passes Ctrl-C on, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flux_megatron.train import run_folder
from flux_megatron.train.config import ConfigError, TrainConfig

INTERRUPTED = 130
POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks to say why, after one has failed
STOP_GRACE_S = 30.0  # for the other ranks to end, after a requested stop ended one


class RankFailure(RuntimeError):
    """A rank ended by itself; the message holds its traceback."""


def train(config: TrainConfig, out: Path, resume: bool) -> int:
    """Run `config` in `out` with processes of our own.

    Returns 0, or 130 after Ctrl-C; raises `RankFailure`.
    """
    world_size, on_gpu = placement(config)
    config.microbatches(world_size // config.parallel.tp)
    run_folder.prepare(config, out, resume)
    ranks = Ranks(config, out, resume, world_size, on_gpu)
    with ranks.forward_signals():
        try:
            return ranks.wait()
        finally:
            ranks.kill()


def placement(config: TrainConfig) -> tuple[int, bool]:
    """How many ranks, and whether on GPUs: on all of them if they suffice for `tp`, else on CPU."""
    parallel = config.parallel
    gpus = 0 if parallel.device == "cpu" else gpu_count()
    needed = parallel.world_size or parallel.tp
    if gpus < needed:
        if parallel.device == "cuda":
            raise ConfigError(
                f"parallel.device=cuda: {needed} ranks need as many GPUs, found {gpus}"
            )
        if gpus:
            print(f"{needed} ranks need as many GPUs, found {gpus}: on the CPU", file=sys.stderr)
        return needed, False
    world_size = parallel.world_size or gpus
    if world_size % parallel.tp:
        raise ConfigError(
            f"{gpus} GPUs are not a multiple of parallel.tp={parallel.tp}: set parallel.world_size"
        )
    return world_size, True


class Ranks:
    """The processes of one run, each in its own session: a terminal's Ctrl-C reaches only us."""

    def __init__(
        self, config: TrainConfig, out: Path, resume: bool, world_size: int, on_gpu: bool
    ) -> None:
        self.logs = out / "logs"
        self.logs.mkdir(exist_ok=True)
        self.stops_asked = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        shared = _environment(config, world_size, on_gpu)
        command = [sys.executable, "-m", "flux_megatron.train.worker", str(out)]
        command += ["--parent", str(os.getpid())] + ["--resume"] * resume
        for rank in range(world_size):
            (self.logs / f"rank_{rank}.error").unlink(missing_ok=True)
            terminal = [os.dup(sys.stdout.fileno())] if rank == 0 else []
            with (self.logs / f"rank_{rank}.log").open("ab") as log:
                process = subprocess.Popen(
                    command + [f"--display={descriptor}" for descriptor in terminal],
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=terminal,
                    start_new_session=True,
                )
            self.processes.append(process)
            for descriptor in terminal:
                os.close(descriptor)

    @contextmanager
    def forward_signals(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) asks all ranks to end after this step, the second kills."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.stops_asked += (
            1  # acted on in wait(): a handler may interrupt Popen while it holds its lock
        )

    def wait(self) -> int:
        """Until all ranks ended, one failed, or the user insists."""
        deadline, told = float("inf"), False
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code is not None for code in codes) or time.monotonic() > deadline:
                break
            if self.stops_asked > 1:
                return INTERRUPTED
            if self.stops_asked and not told:
                told = True
                self._ask_to_stop()
            if any(code not in (None, 0) for code in codes):
                grace = STOP_GRACE_S if self.stops_asked else GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(POLL_S)
        if self.stops_asked or set(codes) == {INTERRUPTED}:
            return INTERRUPTED if any(codes) else 0
        if any(codes):
            raise RankFailure(self._first_error(codes))
        return 0

    def _ask_to_stop(self) -> None:
        print("\nstopping after this step; once more to kill", file=sys.stderr, flush=True)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def kill(self) -> None:
        """End every process of every rank's session, and wait until they are gone."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _first_error(self, codes: list[int | None]) -> str:
        errors = sorted(self.logs.glob("rank_*.error"), key=lambda file: file.stat().st_mtime_ns)
        if errors:
            return f"{errors[0].stem} failed:\n{errors[0].read_text()}"
        rank, code = next((r, code) for r, code in enumerate(codes) if code)
        log = (self.logs / f"rank_{rank}.log").read_text(errors="replace")
        return f"rank_{rank} ended with code {code}; the end of its log:\n{log[-2000:]}"


def _environment(config: TrainConfig, world_size: int, on_gpu: bool) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ours = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **layer_environment(config, on_gpu),
    }
    return defaults | os.environ | ours


def layer_environment(config: TrainConfig, on_gpu: bool) -> dict[str, str]:
    """What our layers read from the environment. Triton decides at import whether it interprets."""
    cpu = {} if on_gpu else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"FLUX_MEGATRON_STRATEGY": config.strategy, **cpu}


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
