"""What the measuring scripts of this folder share: the ranks of torchrun, operands, races, rows."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from flux_megatron import settings
from flux_megatron.lab.bench import provenance
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.symm import cuda_memory, places
from flux_megatron.symm.cuda_memory import SHARED_GPUS
from flux_megatron.tuning.timing import race

COLLECTIVE_LIMIT_S = 120
GRACE_S = 15  # behind the seconds that a script has
APART = "RANKS_APART"  # variable of a script's ranks: what `be_apart` is given

# as rows have them; of the last one ranks share a machine
LINKS = {"memory": "host memory", "sockets": "sockets", "mailboxes": "mailboxes"}

Case = TypeVar("Case")
Calls = Mapping[str, Callable[[], object]]


def shared(ranks: int) -> bool:
    """Whether there are fewer GPUs than ranks, and a variable lets ranks share them. NCCL takes
    ranks of one GPU from several machines alone, so each one's `NCCL_HOSTID` names another, and
    joins them by sockets: times mean nothing then.
    """
    return os.environ.get(SHARED_GPUS) == "1" and ranks > torch.cuda.device_count() > 0


def share_gpus() -> None:
    """In a rank of torchrun, before its CUDA begins."""
    if shared(int(os.environ["LOCAL_WORLD_SIZE"])):
        rank = int(os.environ["LOCAL_RANK"])
        os.environ["LOCAL_RANK"] = str(rank % torch.cuda.device_count())
        os.environ["NCCL_HOSTID"] = f"machine of rank {rank}"


def be_apart(links: str) -> str:
    """In a rank of torchrun, before its CUDA begins: "memory" or "sockets", by which NCCL joins
    machines of one rank, or with ":2" behind it of two. Nothing but NCCL joins them. With
    "mailboxes" they are one machine whose GPUs reach none of each other. The link.
    """
    named, ranks = link_of(links), links.partition(":")[2]
    if named == "mailboxes":
        cuda_memory.why_not_shared = lambda group, device: "no GPU reaches another"
        os.environ["NCCL_P2P_DISABLE"] = "1"
        return named
    machine = f"machine {int(os.environ['RANK']) // int(ranks or 1)}"
    places.machine = lambda: machine
    os.environ |= {"NCCL_HOSTID": machine} if named == "sockets" else {"NCCL_P2P_DISABLE": "1"}
    return named


def link_of(links: str) -> str:
    """As rows have it."""
    if (link := links.partition(":")[0]) not in LINKS:
        raise typer.BadParameter(f"link {link!r} given, {' or '.join(LINKS)} expected")
    return LINKS[link]


def share_gpus_of_ray() -> None:
    """In a worker of Ray's: GPUs that it counts and that are not there are the first again."""
    import ray
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    gpus, given = torch.cuda.device_count(), ray.get_gpu_ids
    show = Manager.set_current_process_visible_accelerator_ids

    def there(numbers: Iterable[Any]) -> list[int]:
        return [int(number) % gpus for number in numbers]

    ray.get_gpu_ids = lambda: there(given())
    Manager.set_current_process_visible_accelerator_ids = staticmethod(lambda ids: show(there(ids)))
    os.environ["NCCL_HOSTID"] = f"machine of process {os.getpid()}"


def start(
    out: Path | None, commit: str, seconds: float, dtype: torch.dtype = torch.bfloat16
) -> Run:
    """Join the ranks of torchrun: a GPU each, or without GPUs a process each."""
    on_gpu = torch.cuda.is_available()
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    if on_gpu:
        provenance.refuse_multicast()
        share_gpus()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=limit)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    about = provenance.describe(device, group.size(), dtype, 1, False, commit)
    return Run(group, device, about, out, time.monotonic() + seconds)


def start_on(device: str, out: Path, commit: str, seconds: float, beside: bool = False) -> Run:
    """`start` of a script's `--device`, which must be this machine's: fp32 on "cpu", a rehearsal,
    else bf16. `auto` chooses for calls alone, or `beside` others. A rank that hangs says where and
    ends.
    """
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    os.environ["FLUX_MEGATRON_BESIDE"] = str(int(beside))
    settings.reload()
    small = device == "cpu"
    if small == torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device} given, this machine has other ones")
    return start(out, commit, seconds, torch.float32 if small else torch.bfloat16)


def measure_each(run: Run, cases: Iterable[Case], measure: Callable[[Case], bool]) -> NoReturn:
    """One case after the other, until the time is over; then end this rank, with 1 if one was
    wrong. At once: threads of communicators have nothing to add.
    """
    right = True
    for case in cases:
        if not run.time_left():
            run.say("no time for the others")
            break
        right = measure(case) and right
    dist.barrier(group=run.group)
    os._exit(0 if right else 1)


@torch.no_grad()
def fill_random(*tensors: Tensor) -> None:
    """Of few numbers a GEMM draws less power, and is faster than in training."""
    for tensor in tensors:
        tensor.normal_()


def race_rows(
    run: Run, table: str, calls: Calls, rounds: int, beside: bool,
    bounds: Callable[[str, Mapping[str, float]], tuple[float, float]],
    columns: Callable[[str], Mapping[str, object]],
) -> bool:  # fmt: skip
    """A row and a line a call: us, and E, 0 and 1 at the two `bounds` of its name. Whether none
    failed.
    """
    result = race(calls, group=run.group, device=run.device, rounds=rounds, beside=beside)
    us = {name: result.median_us(name) for name in result.times_us}
    for name in us:
        serial, gemm = bounds(name, us)
        E = round((serial - us[name]) / (serial - gemm), 3)
        run.row(
            table, **columns(name), beside=beside, median_us=round(us[name], 1), E=E,
            times_us=[round(one, 1) for one in result.times_us[name]],
        )  # fmt: skip
        run.say(f"  {name:20} {us[name]:.1f} us E {E}")
    for name, failure in result.failures.items():
        run.say(f"  {name} FAILED: {failure}")
    return not result.failures
