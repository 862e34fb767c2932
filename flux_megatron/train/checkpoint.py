"""Checkpoints in Megatron's distributed format, whole enough that resuming changes no bit.

OUT/checkpoints/step_N/   whole or absent: written as step_N.partial, then renamed
OUT/checkpoints/latest    the name of the newest whole one, replaced atomically afterwards
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from flux_megatron.train.config import ConfigError
from flux_megatron.train.model import Trainee

if importlib.util.find_spec("psutil") is None:  # its writers would die, and the save wait for them
    raise ImportError("megatron-core's checkpoints need psutil, which it does not install: add it")


def latest(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    pointer = out / "checkpoints" / "latest"
    return pointer.parent / pointer.read_text().strip() if pointer.exists() else None


def save(out: Path, trainee: Trainee, step: int, consumed_samples: int) -> None:
    """Write step_`step` and point `latest` to it. Collective; rank 0 renames."""
    folder = out / "checkpoints"
    final, partial = folder / f"step_{step}", folder / f"step_{step}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(trainee, is_loading=False)
    state |= {
        "step": step,
        "consumed_samples": consumed_samples,
        "world_size": dist.get_world_size(),
    }
    if not final.exists():  # else an earlier run came this far, but did not move the pointer
        dist_checkpointing.save(state, str(partial))
    if dist.get_rank() == 0:
        if not final.exists():
            partial.rename(final)
        shutil.rmtree(partial, ignore_errors=True)
        pointer = folder / "latest.partial"
        pointer.write_text(f"{final.name}\n")
        os.replace(pointer, folder / "latest")
    dist.barrier()


def load(path: Path, trainee: Trainee) -> tuple[int, int]:
    """Restore `trainee` and the random number generators; (step, consumed samples). Collective."""
    saved = dist_checkpointing.load_common_state_dict(str(path))["world_size"]
    if saved != dist.get_world_size():
        raise ConfigError(f"{path} was written by {saved} ranks, got {dist.get_world_size()}")
    state = dist_checkpointing.load(_state(trainee, is_loading=True), str(path))
    trainee.module.load_state_dict(state["model"])
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(state["scheduler"])
    _set_random_state(state["random"])
    return state["step"], state["consumed_samples"]


def _state(trainee: Trainee, is_loading: bool) -> dict[str, Any]:
    model = trainee.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": trainee.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "scheduler": trainee.scheduler.state_dict(),
        "random": ShardedObject(
            "random", _random_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0
        ),
    }


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
