"""The ranks of a command: where they run, and torchrun's agent, which starts and watches them."""

from __future__ import annotations

import ctypes
import datetime
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flux_megatron import settings
from flux_megatron.errors import BadInput, RunFailed
from flux_megatron.lab.train.config import TrainConfig

WAIT_S = 240.0  # for another rank, where the environment gives no time
INTERRUPTED = 130
START_METHOD = "spawn"
SEEN_S = 1.0  # that a failed rank stays: the agent must first see one that was killed before
_PR_SET_PDEATHSIG = 1


def placement(config: TrainConfig) -> tuple[int, bool]:
    """How many ranks, and whether on GPUs: on all of them if they suffice for `tp`, else on CPU."""
    parallel = config.parallel
    gpus = 0 if parallel.device == "cpu" else gpu_count()
    needed = parallel.world_size or parallel.tp
    if gpus >= needed:
        return parallel.world_size or gpus, True
    if parallel.device == "cuda":
        raise BadInput(f"parallel.device=cuda: {needed} ranks need as many GPUs, found {gpus}")
    if gpus:
        print(f"{needed} ranks need as many GPUs, found {gpus}: on the CPU", file=sys.stderr)
    return needed, False


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def set_environment(config: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """What ranks read. Triton decides at its import whether it interprets."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    defaults = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if not on_gpu:
        defaults |= {"GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {**defaults, **os.environ, "FLUX_MEGATRON_STRATEGY": config.strategy}
    settings.reload()  # whoever has read them before


def wait_bound_s() -> float:
    """How long a rank may wait for another; `BadInput` for a bad value of the environment."""
    try:
        return settings.get().timeout_s or WAIT_S
    except ValueError as error:
        raise BadInput(str(error)) from None


def launch(
    body: Callable[..., Any], config: TrainConfig, ranks: int, logs: Path, *arguments: Any
) -> Any:
    """What `body(config, *arguments, device)` returns on rank 0; None after a request to stop,
    which every rank has heard. Raises `RunFailed`.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # one line says it, below
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(logging.NullHandler())
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs.mkdir(parents=True, exist_ok=True)
    redirects = {rank: Std.ALL if rank else Std.ERR for rank in range(ranks)}
    agent = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, run_id="ranks",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="127.0.0.1",
        start_method=START_METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=redirects),
    )  # fmt: skip
    try:
        return elastic_launch(agent, _started)(body, config, arguments)[0]
    except SignalException:
        return None
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == INTERRUPTED:
            return None
        raise RunFailed(f"{_first_error(error, logs)} (more in {logs})") from error


def _first_error(error: Any, logs: Path) -> str:
    """The agent names the first rank that it finds: another may have failed before."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} failed: {failure.message}"
    newest = max(logs.glob("ranks_*"), key=lambda folder: folder.stat().st_mtime_ns)
    files = newest.glob("attempt_0/*/error.json")
    first = min(files, key=lambda file: file.stat().st_mtime_ns)
    said = json.loads(first.read_text())["message"]["message"]
    return f"rank {first.parent.name} failed: {' '.join(said.split())}"


def _started(body: Callable[..., Any], config: TrainConfig, arguments: tuple[Any, ...]) -> Any:
    """A rank that the agent has started. It ends with the agent, and with it the processes that
    write its checkpoint: the last of them would wait for the rank for ever. A terminal's Ctrl-C
    reaches the agent alone, which asks the ranks to stop.
    """
    os.register_at_fork(after_in_child=_end_with_parent)
    _end_with_parent()
    os.setsid()
    settings.reload()
    try:
        result = as_rank(body, config, *arguments)
    except Exception:
        time.sleep(SEEN_S)
        raise
    if result is False:  # an agent that stops its ranks reads no result, for which they would wait
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    return result


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """For the import of megatron-core: its fused functions stay what they are written as.

    It decorates them with `torch.compile`, which loads Inductor: most of what the import takes.
    """
    import torch

    compile = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile


def as_rank(body: Callable[..., Any], config: TrainConfig, *arguments: Any) -> Any:
    """`body(config, *arguments, device)` as the rank that torchrun's variables name."""
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\b")
    import torch
    import torch.distributed as dist

    from flux_megatron.lab.cpu import pretend_cuda

    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    with nullcontext() if on_gpu else _without_compiler():
        from megatron.core import parallel_state

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        pretend_cuda()
    # NCCL counts from a collective's enqueueing: a kernel's wait before it must end first
    bound_s = wait_bound_s() * (2 if on_gpu else 1)
    timeout = datetime.timedelta(seconds=bound_s)
    backend, device_id = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tp, distributed_timeout_minutes=bound_s / 60
    )
    result = body(config, *arguments, device)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return result
