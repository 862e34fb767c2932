"""A DLRM over many nodes of one GPU each: the terms of a study, and the rules between them.

Tables lie whole on nodes, each of which pools the bags of all samples; MLPs are replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flux_megatron.lab.perf import scale_out
from flux_megatron.lab.perf.scale_out import Network


@dataclass(frozen=True)
class Dlrm:
    """`tables` of all nodes, of rows of `dim`; a bag has `pooling` entries. All layers of both MLPs
    are `width` x `width`. The interaction reads or writes the pooled rows of a sample
    `interaction_passes` times in forward, and twice as often in backward.
    """

    name: str
    tables: int
    dim: int
    pooling: float
    bottom_layers: int
    top_layers: int
    width: int
    interaction_passes: float


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet; kernels reach the share of it that they do on an H200. Lookups and
    updates of tables take `lookup_factor` times as long as that.
    """

    name: str
    sms: int
    tflops: float  # dense, in the step's dtype
    memory_gbps: float
    lookup_factor: float


@dataclass(frozen=True)
class Step:
    """`slices`: messages of a fused lookup to each node. `update_ratio`: time of the update of the
    tables over that of their lookup; the part `sort_share` of it needs no gradients yet.
    `layout_copies`: whether the unfused form copies pooled rows before and behind the all-to-all.
    `bottom_beside`: whether the bottom MLP runs beside it. `layers_per_sum`: layers of an MLP whose
    gradients are one all-reduce. `fused_slowdown`: the fused kernel's
    time of pooling over the lookup's, in arm `fused`.
    """

    global_batch: int
    dtype: Literal["float32", "bfloat16"]
    slices: int
    update_ratio: float
    sort_share: float
    layout_copies: bool
    bottom_beside: bool
    layers_per_sum: int
    fused_slowdown: float


@dataclass(frozen=True)
class Study:
    model: Dlrm
    gpu: Gpu
    network: Network
    step: Step


def broken(study: Study) -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong) of each rule that the values break."""
    may_be_zero = {"interaction_passes", "update_ratio", "sort_share", "bottom_layers"}
    for section in ("model", "gpu", "step"):
        yield from _signs(section, getattr(study, section), may_be_zero)
    if rule := scale_out.broken(study.network):
        name, rest = rule.split(" ", 1)
        yield f"network.{name}", rest
        return
    nodes = study.network.nodes
    if study.model.tables < nodes:
        yield "model.tables", f"{study.model.tables} given, at least one for each of {nodes} nodes"
    if study.step.global_batch % nodes:
        yield "step.global_batch", f"{study.step.global_batch} given, a multiple of {nodes} nodes"
    if study.step.sort_share > 1:
        yield "step.sort_share", f"{study.step.sort_share:g} given, at most 1 expected"
    if 0 < study.step.fused_slowdown < 1:
        yield "step.fused_slowdown", f"{study.step.fused_slowdown:g} given, at least 1 expected"


def _signs(section: str, values: Any, may_be_zero: set[str]) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if isinstance(value, (str, bool)):
            continue
        if value < 0 or (value == 0 and field.name not in may_be_zero):
            least = "at least 0" if field.name in may_be_zero else "more than 0"
            yield f"{section}.{field.name}", f"{value:g} given, {least} expected"
