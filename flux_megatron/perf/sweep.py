"""The same training on more and more GPUs: where each kind of parallelism stops paying.

For every number of GPUs the split into tensor, pipeline and data parallelism with the shortest
step, among those that fit into memory. The batch is kept, so every GPU gets less and less to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flux_megatron.perf import memory, schedule
from flux_megatron.perf.step import Step, predict
from flux_megatron.perf.workload import Cluster, Nics, Workload


@dataclass(frozen=True)
class Point:
    """The best split on `gpus` GPUs, or why there is none."""

    gpus: int
    workload: Workload | None
    step: Step | None
    reason: str = ""


def points(workload: Workload, numbers: list[int]) -> list[Point]:
    """One for each number of GPUs, of which the cluster gets as many nodes as that takes."""
    return [best(workload, gpus) for gpus in numbers]


def costly_from(points: list[Point], kinds: tuple[str, ...], share: float) -> int | None:
    """The first number of GPUs at which these exposed kinds are more than `share` of the step."""
    for point in points:
        step = point.step
        if step and sum(step.exposed[kind] for kind in kinds) > share * step.step_us:
            return point.gpus
    return None


def best(workload: Workload, gpus: int) -> Point:
    """The fastest split that fits. `ValueError` for a number that does not fill nodes."""
    sized = replace(workload, cluster=resized(workload.cluster, gpus))
    candidates = list(_splits(sized))
    if not candidates:
        rule = "no tensor x pipeline x data parallelism divides heads, layers and batch"
        return Point(gpus, None, None, rule)
    fitting = [c for c in candidates if memory.estimate(c).fits(c.cluster)]
    if not fitting:
        least = min(memory.estimate(c).total for c in candidates) / 2**30
        has = f"{workload.cluster.memory_gib:g} GiB"
        return Point(gpus, None, None, f"the leanest split needs {least:.0f} GiB of {has}")
    steps = [(predict(c, schedule.closed_form), c) for c in fitting]
    step, chosen = min(steps, key=lambda pair: pair[0].step_us)
    return Point(gpus, chosen, step)


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """As many of its nodes as `gpus` GPUs fill; less than one is a part of one."""
    if gpus < cluster.gpus_per_node:
        return replace(cluster, nodes=1, gpus_per_node=gpus)
    if gpus % cluster.gpus_per_node:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {cluster.gpus_per_node}")
    return replace(cluster, nodes=gpus // cluster.gpus_per_node)


def with_nics(cluster: Cluster, gbit: float | None, latency_us: float | None) -> Cluster:
    """The cluster with cards of `gbit` Gb/s in one direction, and messages of `latency_us`; None
    leaves what it has. A single node without cards gets one.
    """
    nics = cluster.nics
    if gbit is not None:
        nics = replace(nics or Nics(1, 0.0), bandwidth_gbps=gbit / 8)
    if latency_us is not None and nics is not None:
        nics = replace(nics, latency_us=latency_us)
    return replace(cluster, nics=nics)


def _splits(workload: Workload) -> Iterator[Workload]:
    """All by which the model and the batch can be divided, tensor parallelism within a node."""
    model, training, cluster = workload.model, workload.training, workload.cluster
    ep = workload.parallel.ep
    for tp in _divisors(cluster.gpus_per_node):
        if any(size % tp for size in (model.heads, model.kv_heads, model.ffn)):
            continue
        for pp in _divisors(cluster.gpus // tp):
            dp = cluster.gpus // tp // pp
            if model.layers % pp or training.global_batch % (training.micro_batch * dp):
                continue
            if model.moe and (tp > 1 or dp % ep or ep > cluster.gpus_per_node):
                continue
            for chunks in {1, workload.parallel.virtual_stages}:
                parallel = replace(workload.parallel, tp=tp, pp=pp, dp=dp, virtual_stages=chunks)
                split = replace(workload, parallel=parallel)
                if chunks == 1 or (
                    pp > 1 and not model.layers % (pp * chunks) and not split.micro_batches % pp
                ):
                    yield split


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
