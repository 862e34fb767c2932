"""One rank of a run: `python -m flux_megatron.lab.train.worker OUT --parent PID`, by `launcher`.

Under torchrun the command line calls `train` in the process it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import io
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flux_megatron.lab.train import run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.launcher import wait_bound_s
from flux_megatron.lab.train.rank_process import INTERRUPTED, send_error

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from rich.console import Console

# of a rank: configuration, folder, console (rank 0 only), device -> whether it came to its end
Job = Callable[[TrainConfig, Path, "Console | None", Any], bool]
_PR_SET_PDEATHSIG = 1
_START_S = 300.0  # until all processes of a run have imported what they need


def main(arguments: list[str] | None = None) -> int:
    """Run this rank and return its exit code; the parent gets its exception."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--errors", type=int, required=True, help="pipe to the parent")
    parser.add_argument("--store", type=int, help="socket to serve the store on, rank 0 only")
    parser.add_argument("--display", type=int, help="the user's terminal, rank 0 only")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--job", help="module whose `run` is the job; default: train")
    options = parser.parse_args(arguments)
    _die_with(options.parent)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # where it waits, before it is ended
    try:
        console = _console(options.display)
        config = run_folder.recorded_config(options.out)
        job = partial(_train, options.resume)
        if options.job is not None:
            job = importlib.import_module(options.job).run
        return run(job, config, options.out, console, _store(options.store))
    except BaseException as error:
        send_error(options.errors, error)
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            traceback.print_exc()
        os._exit(1)  # at once: what is open with other ranks cannot be closed with them


def train(config: TrainConfig, out: Path, resume: bool, console: Console | None) -> int:
    """Train as a rank that torchrun has started: 0, or 130 if asked to stop."""
    return run(partial(_train, resume), config, out, console)


def run(
    job: Job,
    config: TrainConfig,
    out: Path,
    console: Console | None,
    store: dist.Store | None = None,
) -> int:
    """Do the job as rank RANK of WORLD_SIZE (torchrun's variables): 0, or 130 if asked to stop.

    Without `store` the rendezvous is torchrun's. `RankLost` names a rank that a collective misses.
    """
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\b")
    import torch
    import torch.distributed as dist

    from flux_megatron.integration.cpu_device import without_compiler
    from flux_megatron.lab.train.rank_states import RankStates, naming_lost_ranks

    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    with contextlib.nullcontext() if on_gpu else without_compiler():
        from megatron.core import parallel_state

    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        from flux_megatron.integration.cpu_device import pretend_cuda

        device = torch.device("cpu")
        pretend_cuda()
    # NCCL counts from a collective's enqueueing: a kernel's wait before it must end first
    bound_s = wait_bound_s() * (2 if on_gpu else 1)
    with naming_lost_ranks(_starting):
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=bound_s),
            device_id=device if on_gpu else None,
        )
        ranks = RankStates()
    with naming_lost_ranks(ranks.states):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.parallel.tp,
            distributed_timeout_minutes=bound_s / 60,
        )
        finished = job(config, out, console, device)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return 0 if finished else INTERRUPTED


def _store(listener: int | None) -> dist.Store:
    """The store of a run's ranks: rank 0 serves it, on a socket that its parent bound."""
    import torch.distributed as dist

    from flux_megatron.lab.train.rank_states import naming_lost_ranks

    with naming_lost_ranks(_starting):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=listener is not None,
            master_listen_fd=listener,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_START_S),
        )
        store.set(f"started/{os.environ['RANK']}", "")
        store.wait([f"started/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
    store.set_timeout(datetime.timedelta(seconds=wait_bound_s()))
    return store


def _train(
    resume: bool, config: TrainConfig, out: Path, console: Console | None, device: torch.device
) -> bool:
    import torch.distributed as dist

    from flux_megatron.lab.train import data
    from flux_megatron.lab.train.loop import Loop
    from flux_megatron.lab.train.model import Trainee, layer_context

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


def _starting() -> str:
    return "the run was starting"


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
    display = io.BufferedWriter(_Display(descriptor, "w"))
    return Console(file=io.TextIOWrapper(display, line_buffering=True))


class _Display(io.FileIO):
    """What the user looks at, if there is still somebody: the run goes on without."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
