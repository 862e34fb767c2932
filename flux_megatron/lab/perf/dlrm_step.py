"""The time of a training step of a DLRM over many nodes.

The order is that of ASTRA-sim's DLRM workload: the all-to-all runs beside the bottom MLP and goes
before all-reduces, which run beside backward.

step = predict(study, "unfused")
step.step_us, step.parts["all-to-all, exposed"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from flux_megatron.lab.perf import dlrm
from flux_megatron.lab.perf.dlrm import Gpu, Study
from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import H200, H200_MEMORY_GBPS, Hardware
from flux_megatron.launch.workload import ELEMENT_BYTES

# What a lookup costs on an H200, a library's and our fused one, whose slices travel while others
# are pooled: us of a thousand entries, of a kB of the rows that they name, of a kB of pooled rows.
# Fitted to docs/results/h200x2/embedding_a2a.jsonl.
LOOKUP = (0.2165, 7.0721e-05, 0.0031162)
FUSED = (0.015168, 0.00030296, 0.0017655)
# The copies before and behind the all-to-all together, of a kB of pooled rows.
LAYOUT_US = 0.0013176
Arm = Literal["unfused", "forward", "both", "ours"]
ARMS: tuple[Arm, ...] = ("unfused", "forward", "both", "ours")
EXPOSED = "all-to-all, exposed"


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
    costs = Costs(study)
    layers = study.model.bottom_layers, study.model.top_layers
    mlps = 3 * (costs.layer_us * sum(layers) + costs.interaction_us)  # backward: twice forward
    lookup, exposed, copies = _forward(study, arm, costs)
    clock = lookup + exposed + copies + costs.layer_us * sum(layers) + costs.interaction_us

    sums = _sums(clock, layers[1], costs)
    clock += 2 * (costs.layer_us * layers[1] + costs.interaction_us)
    exchange = Job(clock, costs.exchange_us)
    if not study.step.bottom_beside:
        clock = serve(sums, exchange)[0]
        exposed += clock - exchange.ready_us
    sums += _sums(clock, layers[0], costs)
    clock += 2 * costs.layer_us * layers[0]

    arrived, summed = serve(sums, exchange)
    update = costs.update_us(arm)
    late, behind = _backward(study, arm, costs, arrived - clock)
    clock += late + behind + update
    parts = {
        "lookup": lookup,
        EXPOSED: exposed + late,
        "layout copies": copies + behind,
        "MLPs and interaction": mlps,
        "update of tables": update,
        "all-reduce, exposed": max(0.0, summed - clock),
        "optimizer of MLPs": costs.optimizer_us,
    }
    return Prediction(sum(parts.values()), parts)


def _forward(study: Study, arm: Arm, costs: Costs) -> tuple[float, float, float]:
    """Until the pooled rows of all tables are there: lookup, exposed all-to-all, copies."""
    if arm == "unfused":
        beside = costs.layer_us * study.model.bottom_layers * study.step.bottom_beside
        return costs.lookup_us, max(0.0, costs.exchange_us - beside), costs.layout_us
    pooling = costs.own_lookup_us
    if arm != "ours":
        pooling = costs.lookup_us * study.step.fused_slowdown
    nodes = study.network.nodes
    slices = study.step.slices * (nodes - 1)
    return pooling, fused_us(pooling, costs.slices_us, slices) - pooling, 0.0


def _backward(study: Study, arm: Arm, costs: Costs, left_us: float) -> tuple[float, float]:
    """(exposed all-to-all, copies) of the gradients, `left_us` before all of them are there."""
    left_us = max(0.0, left_us)
    update = costs.update_us(arm)
    if arm == "ours":
        return max(0.0, left_us - study.step.sort_share * update), 0.0
    if arm == "both":
        slices = study.step.slices * (study.network.nodes - 1)
        return fused_us(update, left_us, slices) - update, 0.0
    return left_us, costs.layout_us


def _sums(start_us: float, layers: int, costs: Costs) -> list[Job]:
    """The all-reduces of one MLP's layers, whose backward begins at `start_us`."""
    each = costs.study.step.layers_per_sum
    ends = [min(first + each, layers) for first in range(0, layers, each)]
    sizes = [end - before for before, end in pairwise([0, *ends])]
    return [
        Job(start_us + 2 * end * costs.layer_us, costs.sum_us(size))
        for end, size in zip(ends, sizes, strict=True)
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
        model, step, nodes = study.model, study.step, study.network.nodes
        hardware, element = like_h200(study.gpu, step.dtype), ELEMENT_BYTES[step.dtype]
        bags = step.global_batch * -(-model.tables // nodes)
        entries, row_bytes = bags * model.pooling, model.dim * element
        pooled_bytes = float(bags * row_bytes)
        amounts = entries * 1e-3, entries * row_bytes * 1e-3, pooled_bytes * 1e-3
        # of an H200, by the data sheets' memory bandwidths
        slower = H200_MEMORY_GBPS / study.gpu.memory_gbps
        self.lookup_us, self.own_lookup_us = (
            study.gpu.lookup_factor
            * slower
            * sum(us * n for us, n in zip(of, amounts, strict=True))
            for of in (LOOKUP, FUSED)
        )
        self.layout_us = step.layout_copies * slower * LAYOUT_US * pooled_bytes * 1e-3
        self.exchange_us = dlrm.all_to_all_us(study.network, pooled_bytes)
        self.slices_us = dlrm.all_to_all_us(study.network, pooled_bytes, step.slices)
        samples, self._layer_bytes = step.global_batch // nodes, model.width**2 * element
        self.layer_us = gemm_us(hardware, samples, model.width, model.width, step.dtype)
        passed = samples * model.tables * row_bytes * model.interaction_passes
        self.interaction_us = pass_us(hardware, passed)
        layers = model.bottom_layers + model.top_layers
        self.optimizer_us = pass_us(hardware, 3 * layers * self._layer_bytes)

    def update_us(self, arm: Arm) -> float:
        lookup = self.own_lookup_us if arm == "ours" else self.lookup_us
        return self.study.step.update_ratio * lookup

    def sum_us(self, layers: int) -> float:
        return dlrm.all_reduce_us(self.study.network, layers * self._layer_bytes)


def like_h200(gpu: Gpu, dtype: str) -> Hardware:
    """A GPU by its data sheet at the H200's ratios; fp32 GEMMs reach 80 % of the sheet."""
    share = 0.8 if dtype == "float32" else H200.tflops[dtype] / H200.peak_tflops
    tflops = {dtype: share * gpu.tflops, "float32": share * gpu.tflops}
    memory_gbps = gpu.memory_gbps * H200.memory_gbps / H200_MEMORY_GBPS
    return replace(H200, name=gpu.name, sms=gpu.sms, tflops=tflops, memory_gbps=memory_gbps)
