"""What the measuring scripts of this folder share: the ranks of torchrun, and rows that last.

A row is in the file as soon as it is known, so a run that is cut off has lost none of its rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron.bench import provenance

COLLECTIVE_LIMIT_S = 120


@dataclass
class Run:
    """This rank's place in a run of one table. `out` None: rows are kept by nobody."""

    group: ProcessGroup
    device: torch.device
    about: provenance.Provenance
    out: Path | None = None
    end_s: float = float("inf")

    @property
    def first(self) -> bool:
        return self.group.rank() == 0

    def row(self, table: str, **values: object) -> dict:
        """Append a row, with clocks as they are now; the row on every rank."""
        about = asdict(provenance.with_clocks(self.about, self.device))
        row = {"table": table, **values, "tp": self.group.size(), **about}
        if self.first and self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def time_left(self) -> bool:
        """Whether to go on, the same on all ranks. Collective."""
        late = torch.tensor(float(time.monotonic() > self.end_s), device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.group)
        return not late

    def slowest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of every value over the ranks. Collective."""
        values = values.to(self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values.cpu()

    def failure(self, call: Callable[[], object]) -> str:
        """Make the call: "" or, on all ranks alike, which of them failed and how. Collective."""
        failure = ""
        try:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        answers = [""] * self.group.size()
        dist.all_gather_object(answers, failure, group=self.group)
        return "; ".join(f"rank {r}: {one}" for r, one in enumerate(answers) if one)


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


def finish(run: Run, code: int = 0) -> None:
    """Wait for all ranks, and end at once: threads of communicators have nothing to add."""
    dist.barrier(group=run.group)
    os._exit(code)
