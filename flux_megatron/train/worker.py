"""One rank of a run: `python -m flux_megatron.train.worker OUT --parent PID`, by `launcher`.

Under torchrun the command line calls `run` in the process it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from flux_megatron.train import run_folder
from flux_megatron.train.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from rich.console import Console

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Run this rank and return its exit code.

    An exception is left in OUT/logs/rank_N.error for the parent.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument(
        "--display", type=int, help="file descriptor of the user's terminal, rank 0 only"
    )
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    _die_with(options.parent)
    try:
        console = _console(options.display)
        return run(run_folder.recorded_config(options.out), options.out, options.resume, console)
    except BaseException:
        error = options.out / "logs" / f"rank_{os.environ['RANK']}.error"
        error.write_text(traceback.format_exc())
        raise


def run(config: TrainConfig, out: Path, resume: bool, console: Console | None) -> int:
    """Train as rank RANK of WORLD_SIZE (torchrun's variables): 0, or 130 if asked to stop."""
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\b")
    import torch
    import torch.distributed as dist

    from flux_megatron.train.cpu_device import without_compiler

    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    with contextlib.nullcontext() if on_gpu else without_compiler():
        from megatron.core import parallel_state

    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        from flux_megatron.train.cpu_device import pretend_cuda

        device = torch.device("cpu")
        pretend_cuda()
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.parallel.tp)
    try:
        return 0 if _train(config, out, resume, console, device) else INTERRUPTED
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _train(
    config: TrainConfig, out: Path, resume: bool, console: Console | None, device: torch.device
) -> bool:
    import torch.distributed as dist

    from flux_megatron.train import data
    from flux_megatron.train.loop import Loop
    from flux_megatron.train.model import Trainee, layer_context

    _seed(config.train.seed)
    prefix: list[Path | None] = [None]
    if console is not None:
        prefix = [data.indexed_dataset(config.data, config.data.cache or out / "cache", console)]
    dist.broadcast_object_list(prefix)
    assert prefix[0] is not None, "rank 0 sent no data set"
    dataset = data.gpt_dataset(config, prefix[0])
    with layer_context(config):
        loop = Loop(config, out, Trainee(config, device), dataset, device)
        if resume:
            loop.resume()
        return loop.run(console)


def _seed(seed: int) -> None:
    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _console(descriptor: int | None) -> Console | None:
    from rich.console import Console

    if descriptor is None:
        return None
    return Console(file=os.fdopen(descriptor, "w", buffering=1))


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
