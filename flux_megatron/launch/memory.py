"""What each pipeline stage holds: parameters, and the memory of its GPUs during a step.

Stages are Megatron's: equal numbers of layers; the first has the embeddings, the last the final
norm and the LM head, with a copy of the table where it is tied and there are two stages.
Activations are counted as Korthikanti et al. do (Reducing Activation Recomputation in Large
Transformer Models, 2022, sections 4 and 5), without dropout and its masks: each input that a
backward needs, once. `RESERVED_BYTES` has what an allocator wastes, and transient gradients. All is
of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux_megatron.errors import BadInput
from flux_megatron.launch.workload import ELEMENT_BYTES, FP8, Model, Parallel, Workload

RESERVED_BYTES = 3 * 2**30  # assumed: CUDA's context, NCCL's channels, cuBLAS, fragmentation
# Buffers of one gathered matrix [M, hidden] that each arm keeps for its tensor parallelism.
# megatron: one that all gathers share. te: the fprop and dgrad buffers of four layers and the wgrad
# buffers of qkv and fc1, by Transformer Engine's default methods. flux: the channels for gather and
# scatter, with two regions each, and a third where a CUDA graph captures calls.
GATHERED_BUFFERS = {"megatron": 1, "te": 10, "flux": 4}


@dataclass(frozen=True)
class Stage:
    """The stage of one pipeline rank; with virtual stages `layers` are split into equal chunks."""

    index: int
    layers: int
    has_embedding: bool
    has_head: bool


def stages(w: Workload) -> list[Stage]:
    """By pipeline rank. `BadInput` if the layers cannot be shared out equally."""
    pp, chunks, layers = w.parallel.pp, w.parallel.virtual_stages, w.model.layers
    if layers % (pp * chunks):
        raise BadInput(
            f"{layers} layers cannot be shared out to {pp} pipeline stages of {chunks} chunks"
        )
    return [Stage(i, layers // pp, i == 0, i == pp - 1) for i in range(pp)]


def needed(w: Workload) -> int:
    """Bytes of the fullest GPU. `BadInput` if the layers cannot be shared out equally."""
    return max(of_stage(w, stage) for stage in stages(w))


def fits(w: Workload) -> bool:
    """Beside what is reserved; a CPU machine's ranks share its memory, and reserve nothing."""
    on_cpu, one = w.cluster.gpu == "cpu", needed(w)
    used = one * w.cluster.gpus_per_node if on_cpu else one + RESERVED_BYTES
    return used <= w.cluster.memory_gib * 2**30


def of_stage(w: Workload, stage: Stage) -> int:
    """Parameters, with FP8 and its transpose, and fp32 gradients; Adam's two moments in fp32, and
    the fp32 parameter where the model's is another; activations; the arm's workspace.
    """
    dtype = w.training.dtype
    state = (8 if dtype == "float32" else 12) * updated(w, stage)
    in_fp8 = 2 * ELEMENT_BYTES[FP8] if w.training.fp8 != "none" else 0
    weights = parameters(w, stage) * (ELEMENT_BYTES[dtype] + in_fp8 + 4)
    return weights + state + activations(w, stage) + workspace(w)


def layer_parameters(model: Model, parallel: Parallel) -> int:
    """Of one transformer layer. Norms and biases after a reduction are on every GPU."""
    columns, bias = model.hidden + 2 * model.kv_width + model.fc1_width, int(model.linear_bias)
    shared = model.hidden * (columns + model.hidden + model.ffn) + bias * columns
    return shared // parallel.tp + 2 * (_norm_parameters(model) + bias * model.hidden)


def table_parameters(w: Workload) -> int:
    """Of the embedding table, or of the LM head."""
    return w.padded_vocab // w.parallel.tp * w.model.hidden


def parameters_by_chunk(w: Workload, stage: Stage) -> list[int]:
    """Of one stage, by chunk of layers."""
    model, chunks = w.model, w.parallel.virtual_stages
    counts = [stage.layers // chunks * layer_parameters(model, w.parallel)] * chunks
    if stage.has_embedding:
        counts[0] += table_parameters(w)
        counts[0] += model.seq_length * model.hidden if model.position == "learned" else 0
    if stage.has_head:
        counts[-1] += _norm_parameters(model)
        if not (model.tied_embeddings and stage.has_embedding):
            counts[-1] += table_parameters(w)
    return counts


def parameters(w: Workload, stage: Stage) -> int:
    return sum(parameters_by_chunk(w, stage))


def updated(w: Workload, stage: Stage) -> int:
    """What one GPU's optimizer updates, the distributed one its share of what its replicas have."""
    dp = w.parallel.dp if w.training.distributed_optimizer else 1
    return parameters(w, stage) // dp


def workspace(w: Workload) -> int:
    """The buffers between which tensor-parallel ranks move [M, hidden]."""
    return 0 if w.parallel.tp == 1 else GATHERED_BUFFERS[w.arm] * w.gathered_bytes


def activations(w: Workload, stage: Stage) -> int:
    """Kept for backward by the micro-batches in flight. The head has of one the final norm's input
    and output, the logits, and their fp32 copy, which turns into the softmax and the gradient.
    """
    kept, recomputed, head = layer_activations(w), 0, 0
    if w.training.recompute == "full":
        kept, recomputed = _row_bytes(w), kept  # each layer's input, and one layer in work
    if stage.has_head:
        logits = w.tokens * w.padded_vocab // w.parallel.tp
        head = 2 * _row_bytes(w) + logits * (ELEMENT_BYTES[w.training.dtype] + 4)
    per_chunk = stage.layers // w.parallel.virtual_stages * kept
    return in_flight(w, stage.index) * per_chunk + recomputed + head


def in_flight(w: Workload, rank: int) -> int:
    """Forwards without their backward that pipeline rank `rank` holds at most: micro-batches, or
    with virtual stages chunks of them.
    """
    pp, chunks = w.parallel.pp, w.parallel.virtual_stages
    ahead = (pp - rank - 1) if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    return min(ahead + 1, w.micro_batches * chunks)


def layer_activations(w: Workload) -> int:
    """What one layer keeps of one micro-batch."""
    model, tp, element = w.model, w.parallel.tp, ELEMENT_BYTES[w.training.dtype]
    qkv = 2 * model.hidden + 2 * model.kv_width  # and attention's output
    # beside them the activation's input and output
    split = w.tokens * (qkv + model.fc1_width + model.ffn) * element // tp
    # core attention: its softmax [b, heads, s, s], or with flash attention a row's sum
    scores = 4 if w.training.flash_attention else model.seq_length * element
    if w.training.recompute == "selective" and not w.training.flash_attention:
        scores = 0
    # both norms' inputs and outputs
    return split + 4 * _row_bytes(w) + w.tokens * model.heads // tp * scores


def _row_bytes(w: Workload) -> int:
    """[M, hidden] between the linear layers, which sequence parallelism shares out."""
    return w.gathered_bytes // (w.parallel.tp if w.parallel.sequence_parallel else 1)


def _norm_parameters(model: Model) -> int:
    return model.hidden * (2 if model.norm == "LayerNorm" else 1)
