"""A DLRM over many nodes of one GPU each: the terms of a study, and the rules between them.

Tables lie whole on nodes, each of which pools the bags of all samples; MLPs are replicas. The nodes
are on a switch or a torus: every one has two links, one in each direction, for each dimension of a
torus, and one on a switch. Chunks of a collective are in all dimensions at once, so the slowest
dimension decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from flux_megatron.launch.workload import Count, CountFromZero, FromZero, Positive


@dataclass(frozen=True)
class Network:
    """`shape` are the dimensions of the torus; of a switch it is the number of ports.
    `bandwidth_gbps` is one link's in one direction, in GB/s, `efficiency` the share that
    collectives get of it, `latency_us` that of a hop, `message_us` what a card needs for a message
    beside its bytes.
    """

    kind: Literal["torus", "switch"]
    nodes: Annotated[int, Field(ge=2)]
    shape: tuple[Count, ...]
    bandwidth_gbps: Positive
    latency_us: FromZero
    efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    message_us: FromZero = 0.0

    @property
    def link_gbps(self) -> float:
        return self.bandwidth_gbps * self.efficiency

    @property
    def hops_us(self) -> float:
        """Between the nodes that are furthest apart."""
        ways = sum(size // 2 for size in self.shape) if self.kind == "torus" else 1
        return max(1, ways) * self.latency_us


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


def all_to_all_us(network: Network, size_bytes: float, messages: int = 1) -> float:
    """Each node has `size_bytes`, an equal share for every node and itself, in `messages` to each
    other one.

    A dimension of `n` nodes of a torus carries each byte n / 4 hops in the mean, the shorter way,
    over two links.
    """
    issued = (network.nodes - 1) * messages * network.message_us
    remote = size_bytes * (network.nodes - 1) / network.nodes
    sent = remote / network.link_gbps
    if network.kind == "torus":
        between = ([min(step, n - step) for step in range(n)] for n in network.shape)
        sent = max(map(fmean, between)) * size_bytes / 2 / network.link_gbps
    return network.hops_us + max(issued, sent * 1e-3)


def all_reduce_us(network: Network, size_bytes: float) -> float:
    """Rings: reduce-scatter and all-gather in one dimension after the other, over what is left."""
    if network.kind == "switch":
        return _ring_us(network, size_bytes, network.nodes, links=1)
    total, left = 0.0, size_bytes
    for size in sorted(network.shape, reverse=True):
        total += _ring_us(network, left, size, links=2)
        left /= size
    return total


def _ring_us(network: Network, size_bytes: float, nodes: int, links: int) -> float:
    rounds = 2 * (nodes - 1)
    moved = rounds / nodes * size_bytes
    return rounds * network.latency_us + moved / links / network.link_gbps * 1e-3
