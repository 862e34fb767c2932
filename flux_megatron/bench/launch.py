"""Starts the ranks of a run through torchrun, or joins those that torchrun has started."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Protocol

WORKER = "flux_megatron.bench.worker"


class RankOptions(Protocol):
    """The fields that every worker's options have."""

    @property
    def tp(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def nvls(self) -> bool: ...
    def dumps(self) -> str: ...


def start(options: RankOptions, worker: str = WORKER) -> int:
    """Run `worker` on new ranks, or as one rank under torchrun; returns the exit code."""
    if "RANK" in os.environ:
        import_module(worker).main(options)
        return 0
    if options.device == "cuda" and not options.nvls:
        from flux_megatron.bench.provenance import refuse_multicast

        refuse_multicast()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.tp}", "-m", worker]
    environment = _defaults(options) | os.environ | _needed(options)
    return subprocess.run([*command, options.dumps()], env=environment).returncode


def _defaults(options: RankOptions) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // options.tp)),
        "FLUX_MEGATRON_TIMEOUT_S": "60",  # a missing rank must not hold the machine for long
    }


def _needed(options: RankOptions) -> dict[str, str]:
    """Ranks are of one node. Triton decides at import whether it interprets."""
    on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"GLOO_SOCKET_IFNAME": "lo"} | (on_cpu if options.device == "cpu" else {})
