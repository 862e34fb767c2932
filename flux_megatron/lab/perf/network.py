"""The communication of pipeline and data parallelism, and its time within and between nodes.

Ranks are placed as Megatron does by default: tensor-parallel ranks are neighbours, then come the
replicas of data parallelism, then the pipeline stages. The GPUs of a node share its cards: those
that send at the same time get equal shares, at most one card each.
"""

from __future__ import annotations

import math

from flux_megatron.errors import BadInput
from flux_megatron.lab.perf.collectives import collective_us
from flux_megatron.lab.perf.hardware import of, share_gbps
from flux_megatron.launch.workload import ELEMENT_BYTES, Nics, Workload

GRADIENT_BYTES = 4  # Megatron sums bf16's gradients in fp32


def send_us(workload: Workload, rank: int) -> float:
    """Pipeline rank `rank` sends one micro-batch to the next rank (the last one to the first), or
    the next one its gradient back: both take the same and can travel at the same time.
    """
    parallel = workload.parallel
    if parallel.pp == 1:
        return 0.0
    rows = workload.tokens // (parallel.tp if parallel.sequence_parallel else 1)
    size_bytes = rows * workload.model.hidden * ELEMENT_BYTES[workload.training.dtype]
    return _between_stages_us(workload, rank, (rank + 1) % parallel.pp, size_bytes)


def tied_embeddings_us(workload: Workload, parameters: int) -> float:
    """The all-reduce of a tied table's gradient between the first and the last stage."""
    pp = workload.parallel.pp
    if pp == 1 or not workload.model.tied_embeddings:
        return 0.0
    # two ranks: half of it there and back, twice
    return _between_stages_us(workload, 0, pp - 1, parameters * GRADIENT_BYTES)


def reduce_us(workload: Workload, parameters: int) -> float:
    """The replicas' gradients: a reduce-scatter with the distributed optimizer, else an
    all-reduce.
    """
    times = 1 if workload.training.distributed_optimizer else 2
    return times * _replicas_us(workload, parameters * GRADIENT_BYTES)


def gather_us(workload: Workload, parameters: int) -> float:
    if not workload.training.distributed_optimizer:
        return 0.0
    return _replicas_us(workload, parameters * ELEMENT_BYTES[workload.training.dtype])


def _between_stages_us(workload: Workload, source: int, target: int, size_bytes: int) -> float:
    """All GPUs of a stage, each to its peer in another one."""
    cluster, stage = workload.cluster, workload.parallel.tp * workload.parallel.dp
    if (source * stage) // cluster.gpus_per_node == (target * stage) // cluster.gpus_per_node:
        hardware = of(cluster)
        return hardware.nccl_latency_us + size_bytes / hardware.nccl_gbps * 1e-3
    nics = _nics(workload)
    gbps = share_gbps(nics, min(stage, cluster.gpus_per_node))
    return nics.latency_us + size_bytes / gbps * 1e-3


def _replicas_us(workload: Workload, size_bytes: int) -> float:
    """A ring through all replicas, which enters and leaves each node once; each rank ends or begins
    with `size_bytes`.
    """
    cluster, parallel = workload.cluster, workload.parallel
    if parallel.dp == 1:
        return 0.0
    hardware = of(cluster)
    if parallel.tp * parallel.dp <= cluster.gpus_per_node:
        return collective_us(hardware, size_bytes, parallel.dp)
    nics = _nics(workload)
    in_node = max(1, cluster.gpus_per_node // parallel.tp)  # replicas, each in a ring with others
    rings = cluster.gpus_per_node // in_node
    gbps = in_node * share_gbps(nics, rings * in_node)
    if in_node > 1:
        gbps = min(gbps, hardware.nccl_gbps)
    received = size_bytes * (parallel.dp - 1) / parallel.dp
    latency_us = hardware.nccl_latency_us + nics.latency_us * math.ceil(parallel.dp / in_node)
    return latency_us + received / gbps * 1e-3


def _nics(workload: Workload) -> Nics:
    if workload.cluster.nics is None:
        raise BadInput(
            f"cluster {workload.cluster.name} has no network cards, and {workload.parallel} does "
            f"not fit into a node of {workload.cluster.gpus_per_node} GPUs"
        )
    return workload.cluster.nics
