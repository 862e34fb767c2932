"""The time of a training step: layers, pipeline, replicas and optimizer.

step = predict(workload)
step.step_us, step.exposed["tp"], step.mfu, step.memory_bytes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flux_megatron.errors import BadInput
from flux_megatron.lab.perf import flops, hardware, layer, network, schedule
from flux_megatron.lab.perf.layer import Piece
from flux_megatron.lab.perf.schedule import Buckets, Costs, Times
from flux_megatron.launch import memory
from flux_megatron.launch.workload import FP8, Workload

TP = "tensor-parallel communication"

# Megatron's buckets hold so many parameters, and a million more for each replica beyond forty.
BUCKET = 40_000_000
BUCKET_PER_REPLICA = 1_000_000


@dataclass(frozen=True)
class Step:
    """A predicted step. `parts` adds up to `step_us`: the busiest pipeline rank's work by piece of
    the model, what tensor parallelism, its wait for others, sends, data-parallel communication add,
    and the optimizer. `exposed` has of these tp, pp, dp and bubble. `mfu` is None where no data
    sheet is known.
    """

    step_us: float
    parts: dict[str, float]
    exposed: dict[str, float]
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int


def predict(workload: Workload) -> Step:
    """`BadInput` for a cluster without a GPU model, and for what cannot be shared out."""
    found, parts = schedule.closed_form(costs(workload)), _work(workload)
    exposed = {"tp": parts[TP], "pp": found.pp_us, "dp": found.dp_us, "bubble": found.bubble_us}
    parts["pipeline bubble"], parts["pipeline sends"] = found.bubble_us, found.pp_us
    parts["data-parallel communication"], parts["optimizer"] = found.dp_us, found.optimizer_us
    tokens = workload.training.global_batch * workload.model.seq_length
    per_second, mfu = tokens / found.step_us * 1e6, flops.mfu(workload, found.step_us * 1e-6)
    return Step(found.step_us, parts, exposed, per_second, mfu, memory.needed(workload))


def costs(workload: Workload) -> Costs:
    """The times of the parts of a step. `BadInput` as `predict`."""
    parallel, training = workload.parallel, workload.training
    if workload.micro_batches < 1:
        raise BadInput(
            f"a global batch of {training.global_batch} is no micro-batch of "
            f"{training.micro_batch} for each of {parallel.dp} replicas"
        )
    if workload.model.experts:
        raise BadInput(f"{workload.model.experts} experts given: the cost model knows none")
    if training.fp8 != "none" and FP8 not in hardware.of(workload.cluster).tflops:
        raise BadInput(f"training.fp8 {training.fp8} given, {workload.cluster.gpu} has no FP8")
    ranks = memory.stages(workload)
    pieces = _pieces(workload)
    return Costs(
        micro_batches=workload.micro_batches,
        forward_us=tuple(tuple(sum(p.forward_us for p in c) for c in rank) for rank in pieces),
        backward_us=tuple(tuple(sum(p.backward_us for p in c) for c in rank) for rank in pieces),
        send_us=tuple(network.send_us(workload, stage.index) for stage in ranks),
        reduce_us=_by_bucket(workload, network.reduce_us),
        gather_us=_by_bucket(workload, network.gather_us),
        optimizer_us=tuple(
            layer.optimizer_us(workload, memory.updated(workload, stage)) for stage in ranks
        ),
        tied_us=network.tied_embeddings_us(workload, memory.table_parameters(workload)),
        overlap_reduce=training.overlap_grad_reduce,
        overlap_gather=training.overlap_param_gather,
    )


def _pieces(workload: Workload) -> list[list[list[Piece]]]:
    """[rank][chunk]: the work of one micro-batch; each piece of a layer, for all layers."""
    chunks = workload.parallel.virtual_stages
    one = [*layer.pieces(workload)]
    if workload.training.recompute != "none":
        one.append(Piece("recomputation", 0.0, layer.recompute_us(workload)))
    pieces = []
    for stage in memory.stages(workload):
        count = stage.layers // chunks
        of_chunk = [Piece(piece.name, *(count * us for us in piece[1:])) for piece in one]
        rank = [[*of_chunk] for _ in range(chunks)]
        if stage.has_embedding:
            rank[0].append(layer.embedding(workload))
        if stage.has_head:
            rank[-1].append(layer.head(workload))
        pieces.append(rank)
    return pieces


def _work(workload: Workload) -> dict[str, float]:
    """The busiest pipeline rank's step by piece, with the exposed communication for itself."""
    ranks = [[piece for chunk in rank for piece in chunk] for rank in _pieces(workload)]
    busiest = max(ranks, key=lambda rank: sum(p.forward_us + p.backward_us for p in rank))
    work = {piece.name: 0.0 for piece in busiest} | {TP: 0.0}
    for piece in busiest:
        exposed = piece.forward_exposed_us + piece.backward_exposed_us
        work[TP] += exposed
        work[piece.name] += piece.forward_us + piece.backward_us - exposed
    return {name: us * workload.micro_batches for name, us in work.items()}


def _by_bucket(workload: Workload, time_us: Callable[[Workload, int], float]) -> Buckets:
    """A collective over the replicas for each bucket of each chunk's parameters. Only the first
    chunk of the first rank, whose last backward ends the pipeline, has several.
    """
    dp = workload.parallel.dp
    bucket = max(BUCKET, BUCKET_PER_REPLICA * dp)
    buckets = []
    for stage in memory.stages(workload):
        rank: list[Times] = []
        for count in memory.parameters_by_chunk(workload, stage):
            split = workload.training.overlap_grad_reduce and not rank and stage.index == 0
            parts = math.ceil(count / bucket) if split else 1
            one = time_us(workload, count // parts)
            rank.append((one,) * parts if dp > 1 else ())
        buckets.append(tuple(rank))
    return tuple(buckets)
