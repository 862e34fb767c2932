"""What the measuring scripts of this folder share: the ranks of torchrun."""

from __future__ import annotations

import faulthandler
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer

from flux_megatron.lab.bench import provenance
from flux_megatron.lab.bench.table_run import Run

COLLECTIVE_LIMIT_S = 120
GRACE_S = 15  # behind the seconds that a script has


def start(
    out: Path | None, commit: str, seconds: float, dtype: torch.dtype = torch.bfloat16
) -> Run:
    """Join the ranks of torchrun: a GPU each, or without GPUs a process each."""
    on_gpu = torch.cuda.is_available()
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    if on_gpu:
        provenance.refuse_multicast()
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


def start_on(device: str, out: Path, commit: str, seconds: float) -> Run:
    """`start` of a script's `--device`, which must be this machine's: fp32 on "cpu", a rehearsal,
    else bf16. A rank that hangs says where and ends.
    """
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    small = device == "cpu"
    if small == torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device} given, this machine has other ones")
    return start(out, commit, seconds, torch.float32 if small else torch.bfloat16)


def finish(run: Run, code: int = 0) -> None:
    """Wait for all ranks, and end at once: threads of communicators have nothing to add."""
    dist.barrier(group=run.group)
    os._exit(code)
