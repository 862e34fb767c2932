"""Ranks of a command on this machine: their variables, and what is said when they end."""

from __future__ import annotations

import os
import sys

from flux_megatron import settings
from flux_megatron.errors import BadInput
from flux_megatron.tune_command import rank_processes


def run(arguments: list[str], tp: int, environment: dict[str, str], interrupted: str) -> int:
    """Python with `arguments` as every rank: 0, or 130 after Ctrl-C. `RunFailed` has the
    error of the first rank that failed.
    """
    where = "the CPU" if environment.get("CUDA_VISIBLE_DEVICES") == "" else "the GPUs"
    print(f"starting {tp} ranks on {where}; the first result takes some seconds", file=sys.stderr)
    try:
        rank_processes.run(arguments, tp, environment)
    except KeyboardInterrupt:
        print(f"\nstopped: {interrupted}", file=sys.stderr)
        return rank_processes.INTERRUPTED
    return 0


def inherited() -> dict[str, str]:
    """This process's variables. One that looks like ours and is none is named and left out; of a
    bad value there is a `BadInput` here, not on every rank.
    """
    try:
        settings.read(os.environ)
    except ValueError as error:
        raise BadInput(str(error)) from None
    unknown = settings.unknown(os.environ)
    for line in unknown.values():
        print(line, file=sys.stderr)
    return {name: text for name, text in os.environ.items() if name not in unknown}


def defaults(tp: int, timeout_s: int = 60) -> dict[str, str]:
    """`timeout_s`: a missing rank must not hold the machine for long."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // tp)),
        "FLUX_MEGATRON_TIMEOUT_S": str(timeout_s),
    }


def needed(device: str) -> dict[str, str]:
    """Ranks are of one node. Triton decides at import whether it interprets."""
    on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"GLOO_SOCKET_IFNAME": "lo"} | (on_cpu if device == "cpu" else {})
