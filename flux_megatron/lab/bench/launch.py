"""Starts the ranks of a measurement on this machine, or joins those that torchrun has started."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import typer

from flux_megatron import option_values
from flux_megatron.lab.bench.options import RankOptions
from flux_megatron.tune_command import ranks


def start(options: RankOptions, out: Path, interrupted: str, worker: str) -> NoReturn:
    """Run the module `worker` of this room on new ranks, or as one rank under torchrun, and exit.

    `interrupted` is said after Ctrl-C: what is kept, and how to go on. `RunFailed` has the error of
    the first rank that failed.
    """
    option_values.folder("--out", out)
    worker = f"flux_megatron.lab.bench.{worker}"
    if "RANK" in os.environ:
        import_module(worker).main(options)
        raise typer.Exit(0)
    if options.device == "cuda" and not options.nvls:
        from flux_megatron.lab.bench.provenance import refuse_multicast

        refuse_multicast()
    environment = ranks.defaults(options.tp) | ranks.inherited() | ranks.needed(options.device)
    debug = ["--debug"] * ("--debug" in sys.argv)
    arguments = ["-m", worker, options.dumps(), *debug]
    raise typer.Exit(ranks.run(arguments, options.tp, environment, interrupted))
