"""The contents of each pipeline stage: its layers, the embedding, the head, and their parameters.

Megatron's partition: equal numbers of layers; the first stage has the embeddings, the last one the
final norm and the LM head, with a copy of the table where it is tied and there are two stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux_megatron.launch.workload import Model, Parallel, Workload


@dataclass(frozen=True)
class Stage:
    """The stage of one pipeline rank; with virtual stages `layers` are split into equal chunks."""

    index: int
    layers: int
    has_embedding: bool
    has_head: bool


def stages(workload: Workload) -> list[Stage]:
    """By pipeline rank. `ValueError` if the layers cannot be shared out equally."""
    pp, chunks = workload.parallel.pp, workload.parallel.virtual_stages
    layers = workload.model.layers
    if layers % (pp * chunks):
        raise ValueError(
            f"{layers} layers cannot be shared out to {pp} pipeline stages of {chunks} chunks"
        )
    return [Stage(i, layers // pp, i == 0, i == pp - 1) for i in range(pp)]


def layer_parameters(model: Model, parallel: Parallel) -> int:
    """Of one transformer layer, on one GPU. Norms and biases after a reduction are on every one."""
    qkv = model.hidden + 2 * model.kv_heads * (model.hidden // model.heads)
    fc1 = model.ffn * (2 if model.swiglu else 1)
    bias = int(model.linear_bias)
    shared = model.hidden * (qkv + model.hidden) + bias * qkv
    whole = 2 * _norm_parameters(model) + bias * model.hidden
    if model.moe:
        whole += model.hidden * model.moe.experts + expert_parameters(model, parallel)
    else:
        shared += model.hidden * (fc1 + model.ffn) + bias * fc1
        whole += bias * model.hidden
    return shared // parallel.tp + whole


def expert_parameters(model: Model, parallel: Parallel) -> int:
    """Of one layer's experts on one GPU: other replicas have others."""
    if model.moe is None:
        return 0
    fc1 = model.ffn * (2 if model.swiglu else 1)
    one = model.hidden * (fc1 + model.ffn)
    one += fc1 + model.hidden if model.linear_bias else 0
    return model.moe.experts // parallel.ep * one


def updated(workload: Workload, stage: Stage) -> int:
    """The parameters that one GPU's optimizer updates: with the distributed optimizer its share of
    what its replicas have.
    """
    count = parameters(workload, stage)
    if not workload.training.distributed_optimizer:
        return count
    experts = stage.layers * expert_parameters(workload.model, workload.parallel)
    dp, ep = workload.parallel.dp, workload.parallel.ep
    return (count - experts) // dp + experts * ep // dp


def table_parameters(workload: Workload) -> int:
    """Of the embedding table, or of the LM head, on one GPU."""
    return workload.padded_vocab // workload.parallel.tp * workload.model.hidden


def parameters(workload: Workload, stage: Stage) -> int:
    """Of one stage, on one GPU."""
    return sum(parameters_by_chunk(workload, stage))


def parameters_by_chunk(workload: Workload, stage: Stage) -> list[int]:
    """The same, by chunk of layers."""
    model, chunks = workload.model, workload.parallel.virtual_stages
    counts = [stage.layers // chunks * layer_parameters(model, workload.parallel)] * chunks
    if stage.has_embedding:
        counts[0] += table_parameters(workload)
        counts[0] += model.seq_length * model.hidden if model.position == "learned" else 0
    if stage.has_head:
        counts[-1] += _norm_parameters(model)
        if not (model.tied_embeddings and stage.has_embedding):
            counts[-1] += table_parameters(workload)
    return counts


def warmup(pp: int, rank: int, chunks: int) -> int:
    """Forwards that a rank runs before its first backward's turn, if there are so many."""
    after = pp - rank - 1
    return after if chunks == 1 else 2 * after + (chunks - 1) * pp


def _norm_parameters(model: Model) -> int:
    return model.hidden * (2 if model.norm == "LayerNorm" else 1)
