"""Checkpoints in Megatron's distributed format, whole enough that resuming changes no bit.

OUT/checkpoints/step_N/   all that changes in training, which draws no random numbers
OUT/checkpoints/latest    the name of the newest one, written when that is whole
"""

from __future__ import annotations

import queue
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel

from flux_megatron import option_values
from flux_megatron.lab.train.model import Trainee

# else Megatron starts a process to serve one, which outlives a rank that is killed
filesystem_async._results_queue = queue.Queue()


def save(out: Path, trainee: Trainee, step: int) -> None:
    """Write step_`step`, then let `latest` name it. Collective."""
    folder = out / "checkpoints" / f"step_{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that ended while it wrote this
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(trainee, is_loading=False) | {"step": step}, str(folder))
    if dist.get_rank() == 0:
        option_values.replace(folder.with_name("latest"), f"{folder.name}\n")
    dist.barrier()


def load(folder: Path, trainee: Trainee) -> int:
    """Restore `trainee` from what any number of ranks have written; its step. Collective."""
    state = dist_checkpointing.load(_state(trainee, is_loading=True), str(folder))
    trainee.module.load_state_dict(state["model"])
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


def load_weights(folder: Path, module: GPTModel) -> None:
    state = dist_checkpointing.load({"model": module.sharded_state_dict()}, str(folder))
    module.load_state_dict(state["model"])


def _state(trainee: Trainee, is_loading: bool) -> dict[str, Any]:
    model = trainee.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": trainee.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "scheduler": trainee.scheduler.state_dict(),
    }
