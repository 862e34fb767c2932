"""From the options of `flux-megatron simulate --gpu ...` to values of study/one-node.

values({"cluster.gpu": "H100", "parallel.tp": 8})["cluster.memory_gib"] == 80
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flux_megatron.errors import BadInput
from flux_megatron.lab.perf import hardware

NAME = "study/one-node"
HEAD = 128  # columns of an attention head, where their number is not given


class Machine(NamedTuple):
    """Of one GPU: its memory by its driver, and its link's GB/s in one direction, by data sheet."""

    memory_gib: float
    link: str
    bandwidth_gbps: float


MACHINES = {
    "H200": Machine(140, "nvlink", 450),
    "H100": Machine(80, "nvlink", 450),
    "H800": Machine(80, "nvlink", 200),
    "A100": Machine(80, "nvlink", 300),
    "A100-PCIE": Machine(80, "pcie", 32),
}


def values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and what follows from it, by dotted keys. `BadInput` for a GPU without a
    model, or a width that gives no heads.
    """
    batch = given.get("training.micro_batch", 1) * given.get("parallel.dp", 1)
    return {**_machine(given), **_widths(given), **given, "training.global_batch": batch}


def _machine(given: Mapping[str, Any]) -> dict[str, Any]:
    """One node of as many GPUs as the ranks."""
    name = given.get("cluster.gpu", hardware.H200.name)
    if name not in MACHINES:
        raise BadInput(f"--gpu {name}: one of {', '.join(MACHINES)} expected")
    machine, tp, dp = MACHINES[name], given.get("parallel.tp", 4), given.get("parallel.dp", 1)
    return {
        "cluster.gpu": name,
        "cluster.gpus_per_node": tp * dp,
        "cluster.memory_gib": machine.memory_gib,
        "cluster.link.kind": machine.link,
        "cluster.link.bandwidth_gbps": machine.bandwidth_gbps,
        "parallel.tp": tp,
        "parallel.dp": dp,
    }


def _widths(given: Mapping[str, Any]) -> dict[str, int]:
    """What follows from --hidden unless it is given: heads of 128, keys and values for every head,
    an MLP of four times the width.
    """
    if (hidden := given.get("model.hidden")) is None:
        return {}
    heads = given.get("model.heads", hidden // HEAD)
    if not heads:
        raise BadInput(f"--hidden {hidden}: at least {HEAD} expected, or --heads with it")
    return {"model.heads": heads, "model.kv_heads": heads, "model.ffn": 4 * hidden}
