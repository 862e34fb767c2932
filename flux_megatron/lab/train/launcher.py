"""The parent of a run: decides where it runs, starts one process per rank, leaves none behind."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from flux_megatron import settings
from flux_megatron.lab.train import checkpoint_files, megatron_version, run_folder, text_files
from flux_megatron.lab.train.config import ConfigError, TrainConfig
from flux_megatron.lab.train.rank_processes import RankFailure, RankProcesses

MOST_CPU_RANKS = 64

__all__ = ["RankFailure", "gpu_count", "layer_environment", "placement", "run_ranks", "train"]


def train(config: TrainConfig, out: Path, resume: bool) -> int:
    """Run `config` in `out` with processes of our own.

    Returns 0, or 130 after Ctrl-C; raises `RankFailure`.
    """
    world_size, on_gpu = placement(config)
    check(config, world_size, out, resume)
    with run_folder.claimed(config, out, resume):
        return run_ranks(config, out, world_size, on_gpu, ["--resume"] * resume)


def check(config: TrainConfig, world_size: int, out: Path, resume: bool) -> None:
    """`ConfigError` for all that can be known to fail before a rank starts, or `out` is claimed."""
    config.microbatches(world_size // config.parallel.tp)
    wait_bound_s()
    run_folder.refuse_used(out, resume)
    text_files.check(config)
    if resume:
        rows = run_folder.metrics(out)
        if (found := run_folder.latest(out)) is not None:
            checkpoint_files.check(found)
            _say_what_is_lost(rows, out / run_folder.METRICS, found)


def _say_what_is_lost(rows: list[dict[str, Any]], file: Path, checkpoint: Path) -> None:
    """Curves and comparisons of a resumed run read the rows of all its steps."""
    done = int(checkpoint.name.removeprefix("step_"))
    if lost := {*range(1, done + 1)} - {row["step"] for row in rows}:
        print(
            f"{file} lacks {len(lost)} of the {done} steps up to {checkpoint.name}, such as step "
            f"{min(lost)}: the run goes on without their losses",
            file=sys.stderr,
        )


def run_ranks(config: TrainConfig, out: Path, world_size: int, on_gpu: bool, job: list[str]) -> int:
    """The ranks of `config`, which OUT/config.json has, from their start to their end.

    `job` are the arguments of `worker` that say what they do. Returns and raises as `train`.
    """
    with socket.socket() as store:
        # rank 0 listens here: a port that were only named could be another job's by then
        store.bind(("127.0.0.1", 0))
        store.listen()
        environment = _environment(config, world_size, on_gpu, store.getsockname()[1])
        with RankProcesses(world_size, out, environment, job, store, wait_bound_s()) as ranks:
            store.close()
            return ranks.wait()


WAIT_S = 240.0  # where the environment gives no time


def wait_bound_s() -> float:
    """How long a rank may wait for another; `ConfigError` for a bad value of the environment."""
    try:
        return settings.get().timeout_s or WAIT_S
    except ValueError as error:
        raise ConfigError(str(error)) from None


def placement(config: TrainConfig) -> tuple[int, bool]:
    """How many ranks, and whether on GPUs: on all of them if they suffice for `tp`, else on CPU."""
    megatron_version.check()
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
        if needed > MOST_CPU_RANKS:
            raise ConfigError(
                f"parallel.world_size or parallel.tp: {needed} ranks given, at most "
                f"{MOST_CPU_RANKS} expected on the CPU, where each is a process"
            )
        return needed, False
    world_size = parallel.world_size or gpus
    if world_size % parallel.tp:
        raise ConfigError(
            f"{gpus} GPUs are not a multiple of parallel.tp={parallel.tp}: set parallel.world_size"
        )
    return world_size, True


def _environment(config: TrainConfig, world_size: int, on_gpu: bool, port: int) -> dict[str, str]:
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
        "MASTER_PORT": str(port),
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
