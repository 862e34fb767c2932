"""A rank's place in a measurement that writes rows of a table of its own, and rows that last.

A row is in the file as soon as it is known, so a run that is cut off has lost none of its rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import option_values
from flux_megatron.lab.bench import provenance
from flux_megatron.tuning.timing import failure_of


def append(out: Path, rows: Iterable[object]) -> None:
    """A line a row; whole lines only, so that a run can stop between two of them."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with option_values.writing("--out", out), out.open("a") as file:
        file.write(text)


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

    def row(self, table: str, **values: object) -> None:
        """Append a row, with clocks as they are now."""
        if self.first and self.out is not None:
            about = asdict(provenance.with_clocks(self.about, self.device))
            append(self.out, [{"table": table, **values, "tp": self.group.size(), **about}])

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

    def synchronize(self) -> None:
        """Until this rank's device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def align(self) -> None:
        """Until the devices of all ranks are idle. Collective."""
        self.synchronize()
        dist.barrier(group=self.group)
        self.synchronize()

    def failure(self, call: Callable[[], object]) -> str:
        """Make the call: "" or, on all ranks alike, which of them failed and how. Collective."""

        def step() -> None:
            call()
            self.synchronize()

        return failure_of(step, self.group)
