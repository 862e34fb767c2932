"""From the options of `flux-megatron simulate --gpu ...` to values of study/one-node.

values(Given(gpu="H100", tp=8, hidden=8192))["cluster.memory_gib"] == 80
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from flux_megatron.lab.perf import hardware

NAME = "study/one-node"
HEAD = 128  # columns of an attention head, where their number is not given
MODEL = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_length", "swiglu")


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


@dataclass(frozen=True)
class Given:
    """The options; None: not given."""

    gpu: str | None = None
    tp: int | None = None
    dp: int | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_length: int | None = None
    swiglu: bool | None = None
    micro_batch: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


def values(given: Given) -> dict[str, Any]:
    """Dotted values. `ValueError` for a GPU without a model, or a width that gives no heads."""
    found = {f"model.{name}": getattr(given, name) for name in MODEL}
    found |= _machine(given) | _widths(given)
    batch = given.micro_batch or 1
    found |= {
        "training.micro_batch": given.micro_batch,
        "training.global_batch": batch * (given.dp or 1),
    }
    return {key: value for key, value in found.items() if value is not None}


def _machine(given: Given) -> dict[str, Any]:
    """One node of as many GPUs as the ranks."""
    name = given.gpu or hardware.H200.name
    if name not in MACHINES:
        raise ValueError(f"--gpu {name}: one of {', '.join(MACHINES)} expected")
    machine, tp, dp = MACHINES[name], given.tp or 4, given.dp or 1
    return {
        "cluster.gpu": name,
        "cluster.gpus_per_node": tp * dp,
        "cluster.memory_gib": machine.memory_gib,
        "cluster.link.kind": machine.link,
        "cluster.link.bandwidth_gbps": machine.bandwidth_gbps,
        "parallel.tp": tp,
        "parallel.dp": dp,
    }


def _widths(given: Given) -> dict[str, int]:
    """What follows from --hidden unless it is given: heads of 128, keys and values for every head,
    an MLP of four times the width.
    """
    if given.hidden is None:
        return {}
    heads = given.heads or given.hidden // HEAD
    if not heads:
        raise ValueError(f"--hidden {given.hidden}: at least {HEAD} expected, or --heads with it")
    return {
        "model.heads": heads,
        "model.kv_heads": given.kv_heads or heads,
        "model.ffn": given.ffn or 4 * given.hidden,
    }
