"""Starts the ranks of a measurement on this machine, or joins those that torchrun has started."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import typer

from flux_megatron import command_errors, option_values
from flux_megatron.lab.bench.options import RankOptions
from flux_megatron.tune_command import ranks

LIMIT_S = 120  # of every collective


def start(options: RankOptions, out: Path, interrupted: str, command: str, module: str) -> NoReturn:
    """Run this command once more, on new ranks; as one rank `measure_all` of a module here. Exits.

    `interrupted` is said after Ctrl-C: what is kept, and how to go on. `RunFailed` has the error of
    the first rank that failed.
    """
    option_values.folder("--out", out)
    if "RANK" in os.environ:
        _run_as_rank(options, module, command)
    if options.device == "cuda" and not options.nvls:
        from flux_megatron.lab.bench.provenance import refuse_multicast

        refuse_multicast()
    environment = ranks.defaults(options.tp) | ranks.inherited() | ranks.needed(options.device)
    arguments = ["-m", "flux_megatron.cli", *sys.argv[1:]]
    raise typer.Exit(ranks.run(arguments, options.tp, environment, interrupted))


def _run_as_rank(options: RankOptions, module: str, command: str) -> NoReturn:
    """An error is one line, the traceback with --debug. The process ends here: at a usual exit
    gloo's threads now and then abort it.
    """
    status = 0
    try:
        _as_rank(options, module)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        line, status = command_errors.ending(error, command)
        print(f"rank {os.environ['RANK']}: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _as_rank(options: RankOptions, module: str) -> None:
    """Measure as rank RANK of WORLD_SIZE (torchrun's variables)."""
    import torch

    from flux_megatron.lab.bench import provenance, table_run
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
            device, options.tp, getattr(torch, options.dtype), options.scale, options.nvls,
            options.commit,
        )  # fmt: skip
        run = table_run.Run(world, device, about, Path(options.out), end_s)
        import_module(f"flux_megatron.lab.bench.{module}").measure_all(options, run)
