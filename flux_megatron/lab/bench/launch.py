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
from flux_megatron.tune_command import rank_processes, ranks


def start(options: RankOptions, out: Path, interrupted: str, command: str, module: str) -> NoReturn:
    """Run this command once more, on new ranks; as one rank run the `module` of this room. Exits.

    `interrupted` is said after Ctrl-C: what is kept, and how to go on. `RunFailed` has the error of
    the first rank that failed.
    """
    option_values.folder("--out", out)
    if "RANK" in os.environ:
        main = import_module(f"flux_megatron.lab.bench.{module}").main
        rank_processes.as_rank(main, options, command)
    if options.device == "cuda" and not options.nvls:
        from flux_megatron.lab.bench.provenance import refuse_multicast

        refuse_multicast()
    environment = ranks.defaults(options.tp) | ranks.inherited() | ranks.needed(options.device)
    arguments = ["-m", "flux_megatron.cli", *sys.argv[1:]]
    raise typer.Exit(ranks.run(arguments, options.tp, environment, interrupted))
