"""One rank of `flux-megatron bench`, and how every rank of this room begins and ends."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from flux_megatron.lab.bench.options import Options, RankOptions
from flux_megatron.lab.bench.table_run import Run

LIMIT_S = 120  # the limit of every collective


def main(options: Options) -> None:
    """Measure as rank RANK of WORLD_SIZE (torchrun's variables)."""
    from flux_megatron.lab.bench import runner

    with joined(options, "bfloat16" if options.device == "cuda" else "float32") as run:
        runner.measure_all(options, run)


@contextmanager
def joined(options: RankOptions, dtype: str = "bfloat16") -> Iterator[Run]:
    """This rank's place in the run, while it is in the group of all ranks."""
    import torch

    from flux_megatron.lab.bench import provenance
    from flux_megatron.tune_command import measure

    warnings.filterwarnings("ignore", module=r"torch\b")
    if options.device == "cuda" and not options.nvls:
        provenance.refuse_multicast()
    limit_s = math.inf if options.time_limit_s is None else options.time_limit_s
    end_s = time.monotonic() + limit_s
    with measure.joined(options.device, timedelta(seconds=LIMIT_S)) as (world, device):
        if world.size() != options.tp:
            raise ValueError(f"{world.size()} ranks given, --tp {options.tp} expected")
        about = provenance.describe(
            device, options.tp, getattr(torch, dtype), options.scale, options.nvls, options.commit
        )
        yield Run(world, device, about, Path(options.out), end_s)
