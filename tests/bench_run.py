"""The place of a CPU rank in a measurement, for tests of the laboratory's scripts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from flux_megatron.lab.bench import provenance
from flux_megatron.lab.bench.table_run import Run


def run_here(out: Path | None = None, scale: int = 1) -> Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.float32, scale, False, "none")
    return Run(group, device, about, out)


def rows_of(file: Path) -> list[SimpleNamespace]:
    return [SimpleNamespace(**json.loads(line)) for line in file.read_text().splitlines()]
