"""Starts the ranks of a measurement on this machine, or joins those that torchrun has started."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Protocol

from flux_megatron.tune_command import ranks

WORKER = "flux_megatron.lab.bench.worker"


class RankOptions(Protocol):
    """The fields that every worker's options have."""

    @property
    def tp(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def nvls(self) -> bool: ...
    def dumps(self) -> str: ...


def start(options: RankOptions, interrupted: str, worker: str = WORKER) -> int:
    """Run `worker` on new ranks, or as one rank under torchrun; returns the exit code.

    `interrupted` is said after Ctrl-C: what is kept, and how to go on. `RunFailed` has the error of
    the first rank that failed.
    """
    if "RANK" in os.environ:
        import_module(worker).main(options)
        return 0
    if options.device == "cuda" and not options.nvls:
        from flux_megatron.lab.bench.provenance import refuse_multicast

        refuse_multicast()
    environment = ranks.defaults(options.tp) | ranks.inherited() | ranks.needed(options.device)
    debug = ["--debug"] * ("--debug" in sys.argv)
    arguments = ["-m", worker, options.dumps(), *debug]
    return ranks.run(arguments, options.tp, environment, interrupted)
