"""A DLRM over many nodes of one GPU each: the terms of a study, and the time of a training step.

Tables lie whole on nodes, each of which pools the bags of all samples; MLPs are replicas. The nodes
are on a switch or a torus: every one has two links, one in each direction, for each dimension of a
torus, and one on a switch. Chunks of a collective are in all dimensions at once, so the slowest
dimension decides.

The order is that of ASTRA-sim's DLRM workload: the all-to-all runs beside the bottom MLP and goes
before all-reduces, which run beside backward.

step = predict(study, "unfused")
step.step_us, step.parts["all-to-all, exposed"]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from flux_megatron.lab.perf import hardware
from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.launch.workload import (
    ELEMENT_BYTES,
    Count,
    CountFromZero,
    FromZero,
    Positive,
)

# What a lookup costs on an H200, a library's and our fused one, whose slices travel while others
# are pooled: us of a thousand entries, of a kB of the rows that they name, of a kB of pooled rows.
# Fitted to docs/results/h200x2/embedding_a2a.jsonl.
LOOKUP = (0.2165, 7.0721e-05, 0.0031162)
FUSED = (0.015168, 0.00030296, 0.0017655)
# The copies before and behind the all-to-all together, of a kB of pooled rows.
LAYOUT_US = 0.0013176
Arm = Literal["unfused", "forward", "both", "ours"]
ARMS: tuple[Arm, ...] = ("unfused", "forward", "both", "ours")


@dataclass(frozen=True)
class Network:
    """`shape` are the dimensions of the torus; one number is that of the ports of a switch.
    `bandwidth_gbps` is one link's in one direction, in GB/s, `latency_us` that of a hop,
    `message_us` what a card needs for a message beside its bytes.
    """

    shape: tuple[Count, ...]
    bandwidth_gbps: Positive
    latency_us: FromZero
    message_us: FromZero = 0.0

    @property
    def nodes(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        return "torus" if len(self.shape) > 1 else "switch"


@dataclass(frozen=True)
class Dlrm:
    """`tables` of all nodes, of rows of `dim`; a bag has `pooling` entries. All layers of both MLPs
    are `width` x `width`. The interaction reads or writes the pooled rows of a sample
    `interaction_passes` times in forward, and twice as often in backward.
    """

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
    `layers_per_sum`: layers of an MLP whose gradients are one all-reduce. `fused_slowdown`: the
    fused kernel's time of pooling over the lookup's, in arms `forward` and `both`.
    """

    global_batch: Count
    dtype: Literal["float32", "bfloat16"]
    slices: Count
    update_ratio: FromZero
    sort_share: Annotated[float, Field(ge=0, le=1)]
    layout_copies: bool
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
    nodes, tables, batch = study.network.nodes, study.model.tables, study.step.global_batch
    if nodes == 1:
        yield "network.shape", f"{[*study.network.shape]} given, two nodes or more expected"
    if tables < nodes:
        yield "model.tables", f"{tables} given, at least one for each of {nodes} nodes"
    if batch % nodes:
        yield "step.global_batch", f"{batch} given, a multiple of {nodes} nodes"


@dataclass(frozen=True)
class Prediction:
    """`parts` adds up to `step_us`; communication counts where it is exposed."""

    step_us: float
    parts: dict[str, float]


class Job(NamedTuple):
    """A collective, of which the network runs one at a time."""

    ready_us: float
    time_us: float


def predict(study: Study, arm: Arm) -> Prediction:
    """The step of the busiest node, by arm:

    | arm | forward | backward |
    | --- | --- | --- |
    | unfused | lookup, then all-to-all | all-to-all, then update |
    | forward | slices travel while others are pooled | as unfused |
    | both | as forward | tables are updated by slices, as they arrive |
    | ours | as forward, by our kernel's times | gradients travel while entries are sorted |
    """
    costs, layout = Costs(study), 0.0
    bottom, top = (
        costs.layer_us * layers for layers in (study.model.bottom_layers, study.model.top_layers)
    )
    lookup = pooling = costs.own_lookup_us if arm == "ours" else costs.lookup_us
    update = study.step.update_ratio * lookup
    if arm in ("forward", "both"):
        pooling *= study.step.fused_slowdown
    slices = study.step.slices * (study.network.nodes - 1)
    if arm == "unfused":
        layout, exposed = costs.layout_us, max(0.0, costs.exchange_us - bottom)
    else:
        exposed = fused_us(pooling, costs.slices_us, slices) - pooling
    clock = pooling + exposed + layout + bottom + top + costs.interaction_us

    sums = _sums(clock, study.model.top_layers, costs)
    clock += 2 * (top + costs.interaction_us)  # backward: twice forward
    exchange = Job(clock, costs.exchange_us)
    sums += _sums(clock, study.model.bottom_layers, costs)
    clock += 2 * bottom

    arrived, summed = serve(sums, exchange)
    late = max(0.0, arrived - clock)
    if arm == "ours":
        late = max(0.0, late - study.step.sort_share * update)
    elif arm == "both":
        late = fused_us(update, late, slices) - update
    else:
        layout, clock = layout + costs.layout_us, clock + costs.layout_us
    clock += late + update
    parts = {
        "lookup": pooling,
        "all-to-all, exposed": exposed + late,
        "layout copies": layout,
        "MLPs and interaction": 3 * (bottom + top + costs.interaction_us),
        "update of tables": update,
        "all-reduce, exposed": max(0.0, summed - clock),
        "optimizer of MLPs": costs.optimizer_us,
    }
    return Prediction(sum(parts.values()), parts)


def _sums(start_us: float, layers: int, costs: Costs) -> list[Job]:
    """The all-reduces of one MLP's layers, whose backward begins at `start_us`."""
    each = costs.study.step.layers_per_sum
    ends = [*range(0, layers, each), layers]
    return [
        Job(start_us + 2 * end * costs.layer_us, costs.sum_us(end - before))
        for before, end in pairwise(ends)
    ]


def serve(sums: Sequence[Job], urgent: Job) -> tuple[float, float]:
    """(when `urgent` has ended, when all have): it begins before what has not begun by then."""
    free, arrived = 0.0, None
    for job in sums:
        if arrived is None and max(free, job.ready_us) >= urgent.ready_us:
            free = arrived = max(free, urgent.ready_us) + urgent.time_us
        free = max(free, job.ready_us) + job.time_us
    if arrived is None:
        free = arrived = max(free, urgent.ready_us) + urgent.time_us
    return arrived, free


def fused_us(pooling_us: float, transfer_us: float, slices: int) -> float:
    """One kernel that sends each of `slices` as soon as it is pooled, remote ones first.

    Whichever is longer hides the other but for one slice: the first is pooled before anything
    travels, the last one travels when all are pooled.
    """
    first, last = pooling_us / slices, transfer_us / slices
    return max(pooling_us + last, first + transfer_us)


class Costs:
    """The times of a study's parts, in microseconds: of the lookup of a node's tables for all
    samples, by a library and by ours, of both copies of one direction, of the all-to-all, whole and
    in slices, of one MLP layer's forward of this node's samples, of the interaction, and of the
    MLPs' optimizer, which reads parameters and gradients and writes parameters.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        model, step, nodes, element = (
            study.model, study.step, study.network.nodes, ELEMENT_BYTES[study.step.dtype]
        )  # fmt: skip
        peaks = dict.fromkeys(("float32", "bfloat16"), study.gpu.tflops)
        sheet = study.gpu.name, study.gpu.sms, peaks, study.gpu.memory_gbps
        gpu = hardware.like_h200(*sheet, hardware.H200_LINK)
        bags = step.global_batch * -(-model.tables // nodes)
        entries, row_bytes = bags * model.pooling, model.dim * element
        pooled_bytes = float(bags * row_bytes)
        amounts = entries * 1e-3, entries * row_bytes * 1e-3, pooled_bytes * 1e-3
        # of an H200, by the data sheets' memory bandwidths
        slower = hardware.H200_MEMORY_GBPS / study.gpu.memory_gbps
        self.lookup_us, self.own_lookup_us = (
            study.gpu.lookup_factor
            * slower
            * sum(us * n for us, n in zip(of, amounts, strict=True))
            for of in (LOOKUP, FUSED)
        )
        self.layout_us = step.layout_copies * slower * LAYOUT_US * pooled_bytes * 1e-3
        self.exchange_us = all_to_all_us(study.network, pooled_bytes)
        self.slices_us = all_to_all_us(study.network, pooled_bytes, step.slices)
        samples, self._layer_bytes = step.global_batch // nodes, model.width**2 * element
        self.layer_us = gemm_us(gpu, samples, model.width, model.width, step.dtype)
        passed = samples * model.tables * row_bytes * model.interaction_passes
        self.interaction_us = pass_us(gpu, passed)
        layers = model.bottom_layers + model.top_layers
        self.optimizer_us = pass_us(gpu, 3 * layers * self._layer_bytes)

    def sum_us(self, layers: int) -> float:
        return all_reduce_us(self.study.network, layers * self._layer_bytes)


def all_to_all_us(network: Network, size_bytes: float, messages: int = 1) -> float:
    """Each node has `size_bytes`, an equal share for every node and itself, in `messages` to each
    other one.

    A dimension of `n` nodes of a torus carries each byte n / 4 hops in the mean, the shorter way,
    over two links.
    """
    issued = (network.nodes - 1) * messages * network.message_us
    hops, sent = 1, size_bytes * (network.nodes - 1) / network.nodes
    if network.kind == "torus":
        hops = max(1, sum(size // 2 for size in network.shape))  # between the furthest nodes
        between = ([min(step, n - step) for step in range(n)] for n in network.shape)
        sent = max(map(fmean, between)) * size_bytes / 2
    return hops * network.latency_us + max(issued, sent / network.bandwidth_gbps * 1e-3)


def all_reduce_us(network: Network, size_bytes: float) -> float:
    """Rings: reduce-scatter and all-gather in one dimension after the other, over what is left."""
    total, left, links = 0.0, size_bytes, 2 if network.kind == "torus" else 1
    for size in sorted(network.shape, reverse=True):
        rounds = 2 * (size - 1)
        moved = rounds / size * left
        total += rounds * network.latency_us + moved / links / network.bandwidth_gbps * 1e-3
        left /= size
    return total
