"""Checkpoints in Megatron's distributed format, whole enough that resuming changes no bit.

OUT/checkpoints/step_N/   whole or absent: written as step_N.partial, then renamed
OUT/checkpoints/latest    the name of the newest whole one, replaced atomically afterwards
"""

from __future__ import annotations

import importlib.util
import os
import queue
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from flux_megatron.errors import RunFailed
from flux_megatron.lab.train import checkpoint_files, run_folder
from flux_megatron.lab.train.config import ConfigError
from flux_megatron.lab.train.model import Trainee
from flux_megatron.lab.train.rank_states import of_a_collective

if importlib.util.find_spec("psutil") is None:  # its writers would die, and the save wait for them
    raise ImportError("megatron-core's checkpoints need psutil, which it does not install: add it")


def _write(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write this rank's files in this process.

    Megatron's own writers are processes: they outlive a rank that is killed, and a rank waits
    forever for a writer that is.
    """
    written = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)  # which it takes out again
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, done, count, use_fsync=True, use_msc=use_msc
        )
        _, written[index] = done.get_nowait()
    failed = (result for result in written.values() if isinstance(result, Exception))
    results.put(next(failed, written))


filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
filesystem_async._results_queue = queue.Queue()  # else a process of its own serves one


class CheckpointError(RunFailed):
    """A checkpoint could not be written. Look at the disk; the last whole one is still there."""


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
        try:
            dist_checkpointing.save(state, str(partial))
        except (Exception, CheckpointException) as error:  # writers raise any type on a full disk
            if of_a_collective(error):
                raise
            raise CheckpointError(
                f"{partial} could not be written, {run_folder.free(out)}: free some, then continue "
                f"by --resume ({_last_line(error)})"
            ) from error
    if dist.get_rank() == 0:
        if not final.exists():
            for written in (*partial.iterdir(), partial):
                _sync(written)
            partial.rename(final)
        shutil.rmtree(partial, ignore_errors=True)
        pointer = folder / "latest.partial"
        pointer.write_text(f"{final.name}\n")
        _sync(pointer)
        os.replace(pointer, folder / "latest")
    dist.barrier()


def load(path: Path, trainee: Trainee) -> tuple[int, int]:
    """Restore `trainee`, and the random number generators if as many ranks wrote them; (step,
    consumed samples). Collective.
    """
    wanted = _state(trainee, is_loading=True)
    with _naming_torn_files(path):
        saved = dist_checkpointing.load_common_state_dict(str(path))
        if saved["world_size"] != dist.get_world_size():
            # each rank's own, of which training without dropout draws nothing
            del wanted["random"]
        state = dist_checkpointing.load(wanted, str(path))
    trainee.module.load_state_dict(state["model"])
    trainee.optimizer.load_state_dict(state["optimizer"])
    trainee.scheduler.load_state_dict(state["scheduler"])
    if "random" in wanted:
        _set_random_state(state["random"])
    return state["step"], state["consumed_samples"]


def load_weights(path: Path, module: GPTModel) -> None:
    """The weights alone, which any number of ranks may have written. Collective."""
    with _naming_torn_files(path):
        state = dist_checkpointing.load({"model": module.sharded_state_dict()}, str(path))
    module.load_state_dict(state["model"])


@contextmanager
def _naming_torn_files(path: Path) -> Iterator[None]:
    """`ConfigError` in place of what readers raise on files that are torn or missing."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:  # readers raise any type on a torn file
        if of_a_collective(error):
            raise
        raise ConfigError(
            f"{path} cannot be read ({_last_line(error)}); {checkpoint_files.remedy(path)}"
        ) from error


def _last_line(error: BaseException) -> str:
    """Where it quotes other ranks' tracebacks, the end of one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _sync(path: Path) -> None:
    """Have the disk hold it before what refers to it: a machine may lose its power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
