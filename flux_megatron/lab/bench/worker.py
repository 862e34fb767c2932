"""One rank: `python -m flux_megatron.lab.bench.worker OPTIONS`, by `launch` or torchrun.

OPTIONS is `options.Options` as JSON.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from flux_megatron.lab.bench.options import Options, RankOptions
from flux_megatron.tune_command.rank_processes import as_rank, rendezvous

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

LIMIT_S = 120  # the limit of every collective


def main(options: Options) -> None:
    """Measure as rank RANK of WORLD_SIZE (torchrun's variables)."""
    from rich.console import Console

    from flux_megatron.lab.bench import runner

    table = runner.result_table()
    with joined(options) as (world, device):
        runner.run(options, world, device, runner.show_in(table, options))
    if table.row_count:  # on rank 0
        Console().print(table)


@contextmanager
def joined(options: RankOptions) -> Iterator[tuple[ProcessGroup, torch.device]]:
    """The group of all ranks, while this one is in it, and its device."""
    import torch
    import torch.distributed as dist

    from flux_megatron.lab.bench.provenance import refuse_multicast

    warnings.filterwarnings("ignore", module=r"torch\b")
    on_gpu = options.device == "cuda"
    if on_gpu and not options.nvls:
        refuse_multicast()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        device_id=device if on_gpu else None,
        timeout=timedelta(seconds=LIMIT_S),
        **rendezvous(),
    )
    try:
        world = dist.group.WORLD
        assert world is not None, "initialised above"
        if world.size() != options.tp:
            raise ValueError(f"{world.size()} ranks given, --tp {options.tp} expected")
        yield world, device
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    as_rank(main, Options.loads(sys.argv[1]), "bench")
