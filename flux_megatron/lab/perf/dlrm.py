"""A DLRM over many nodes of one GPU each: the terms of a study, and the rules between them.

Tables lie whole on nodes, each of which pools the bags of all samples; MLPs are replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from flux_megatron.lab.perf.scale_out import Network
from flux_megatron.launch.workload import Count, CountFromZero, FromZero, Positive


@dataclass(frozen=True)
class Dlrm:
    """`tables` of all nodes, of rows of `dim`; a bag has `pooling` entries. All layers of both MLPs
    are `width` x `width`. The interaction reads or writes the pooled rows of a sample
    `interaction_passes` times in forward, and twice as often in backward.
    """

    name: str
    tables: Count
    dim: Count
    pooling: Positive
    bottom_layers: CountFromZero
    top_layers: Count
    width: Count
    interaction_passes: FromZero


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet; kernels reach the share of it that they do on an H200. Lookups and
    updates of tables take `lookup_factor` times as long as that.
    """

    name: str
    sms: Count
    tflops: Positive  # dense, in the step's dtype
    memory_gbps: Positive
    lookup_factor: Positive


@dataclass(frozen=True)
class Step:
    """`slices`: messages of a fused lookup to each node. `update_ratio`: time of the update of the
    tables over that of their lookup; the part `sort_share` of it needs no gradients yet.
    `layout_copies`: whether the unfused form copies pooled rows before and behind the all-to-all.
    `bottom_beside`: whether the bottom MLP runs beside it. `layers_per_sum`: layers of an MLP whose
    gradients are one all-reduce. `fused_slowdown`: the fused kernel's
    time of pooling over the lookup's, in arm `fused`.
    """

    global_batch: Count
    dtype: Literal["float32", "bfloat16"]
    slices: Count
    update_ratio: FromZero
    sort_share: Annotated[float, Field(ge=0, le=1)]
    layout_copies: bool
    bottom_beside: bool
    layers_per_sum: Count
    fused_slowdown: Annotated[float, Field(ge=1)]


@dataclass(frozen=True)
class Study:
    model: Dlrm
    gpu: Gpu
    network: Network
    step: Step


def broken(study: Study) -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong) of each rule between the values."""
    network, nodes = study.network, study.network.nodes
    given = f"{[*network.shape]} given"
    if math.prod(network.shape) != nodes:
        yield "network.shape", f"{given}, {nodes} nodes expected"
    elif network.kind == "switch" and len(network.shape) != 1:
        yield "network.shape", f"{given}, one number expected for a switch"
    if study.model.tables < nodes:
        yield "model.tables", f"{study.model.tables} given, at least one for each of {nodes} nodes"
    if study.step.global_batch % nodes:
        yield "step.global_batch", f"{study.step.global_batch} given, a multiple of {nodes} nodes"
