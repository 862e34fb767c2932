"""The memory of the fullest GPU during a step.

Activations are counted as Korthikanti et al. do (Reducing Activation Recomputation in Large
Transformer Models, 2022, sections 4 and 5), without dropout and its masks: each input that a
backward needs, once. What an allocator wastes, and transient gradients, are in `RESERVED_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux_megatron.launch import stages
from flux_megatron.launch.stages import Stage
from flux_megatron.launch.workload import ELEMENT_BYTES, Cluster, Workload

RESERVED_BYTES = 3 * 2**30  # assumed: CUDA's context, NCCL's channels, cuBLAS, fragmentation

# Buffers of one gathered matrix [M, hidden] that each arm keeps for its tensor parallelism.
# megatron: one that all gathers share. te: the fprop and dgrad buffers of four layers and the wgrad
# buffers of qkv and fc1, by Transformer Engine's default methods. flux: the channels for gather and
# scatter, with three regions each.
GATHERED_BUFFERS = {"megatron": 1, "te": 10, "flux": 6}


# Of capacity x hidden: a2a_gemm and gemm_a2a have two regions each.
EXPERT_BUFFERS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of pipeline stage `stage`; `workspace` is the arm's own."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    def fits(self, cluster: Cluster) -> bool:
        """Beside what is reserved; a CPU machine's ranks share its memory, and reserve nothing."""
        available = cluster.memory_gib * 2**30
        if cluster.gpu == "cpu":
            return self.total * cluster.gpus_per_node <= available
        return self.total + RESERVED_BYTES <= available


def estimate(workload: Workload) -> Memory:
    """Of the fullest GPU. `ValueError` if the layers cannot be shared out equally."""
    return max((of_stage(workload, s) for s in stages.stages(workload)), key=lambda m: m.total)


def of_stage(workload: Workload, stage: Stage) -> Memory:
    """Bytes on each GPU of one stage."""
    training = workload.training
    count = stages.parameters(workload, stage)
    # Adam's two moments in fp32, and the fp32 parameter where the model's is another
    state = 8 if training.dtype == "float32" else 12
    return Memory(
        stage=stage.index,
        parameters=count * ELEMENT_BYTES[training.dtype],
        gradients=count * 4,
        optimizer=state * stages.updated(workload, stage),
        activations=activations(workload, stage),
        workspace=workspace(workload),
    )


def workspace(workload: Workload) -> int:
    """The buffers between which the ranks move [M, hidden]: tensor-parallel ones, and those of
    fused experts.
    """
    if workload.model.moe and workload.arm == "flux" and workload.parallel.ep > 1:
        return EXPERT_BUFFERS * _capacity(workload) * _gathered_bytes(workload)
    if workload.parallel.tp == 1:
        return 0
    return GATHERED_BUFFERS[workload.arm] * _gathered_bytes(workload)


def activations(workload: Workload, stage: Stage) -> int:
    """Kept for backward by the micro-batches in flight, with the head's logits of one."""
    kept = layer_activations(workload)
    recomputed = 0
    if workload.training.recompute == "full":
        kept, recomputed = _row_bytes(workload), kept  # each layer's input, and one layer in work
    per_chunk = stage.layers // workload.parallel.virtual_stages * kept
    total = in_flight(workload, stage.index) * per_chunk + recomputed
    return total + (_head_bytes(workload) if stage.has_head else 0)


def in_flight(workload: Workload, rank: int) -> int:
    """Forwards without their backward that pipeline rank `rank` holds at most: micro-batches, or
    with virtual stages chunks of them.
    """
    chunks = workload.parallel.virtual_stages
    ahead = stages.warmup(workload.parallel.pp, rank, chunks)
    return min(ahead + 1, workload.micro_batches * chunks)


def layer_activations(workload: Workload) -> int:
    """What one layer keeps of one micro-batch, on one GPU."""
    model, training, tp = workload.model, workload.training, workload.parallel.tp
    element = ELEMENT_BYTES[training.dtype]
    kv = model.kv_heads * (model.hidden // model.heads)
    fc1 = model.ffn * (2 if model.swiglu else 1)
    # q, k, v, attention's output, the activation's input and output
    split = workload.tokens * (2 * model.hidden + 2 * kv + fc1 + model.ffn) * element // tp
    if model.moe:  # rows of each token's experts as they come, the activation, and what goes back
        one = 2 * model.hidden + fc1 + model.ffn
        split = workload.tokens * (2 * model.hidden + 2 * kv) * element
        split += int(workload.expert_rows * one) * element
    # both norms' inputs and outputs
    return split + 4 * _row_bytes(workload) + _scores_bytes(workload)


def _scores_bytes(workload: Workload) -> int:
    """Of core attention: its softmax [b, heads, s, s], or with flash attention a row's sum."""
    model, training = workload.model, workload.training
    rows = workload.tokens * model.heads // workload.parallel.tp
    if training.flash_attention:
        return 4 * rows
    if training.recompute == "selective":
        return 0
    return rows * model.seq_length * ELEMENT_BYTES[training.dtype]


def _head_bytes(workload: Workload) -> int:
    """The final norm's input and output, the logits, and their fp32 copy, which turns into the
    softmax and then the gradient.
    """
    element = ELEMENT_BYTES[workload.training.dtype]
    logits = workload.tokens * workload.padded_vocab // workload.parallel.tp
    return 2 * _row_bytes(workload) + logits * (element + 4)


def _gathered_bytes(workload: Workload) -> int:
    return workload.tokens * workload.model.hidden * ELEMENT_BYTES[workload.training.dtype]


def _capacity(workload: Workload) -> int:
    """The rows that a rank may get at most, over the tokens of a micro-batch."""
    moe, ep = workload.moe, workload.parallel.ep
    return min(moe.topk, moe.experts // ep) * ep


def _row_bytes(workload: Workload) -> int:
    """[M, hidden] between the linear layers, which sequence parallelism shares out."""
    shared = workload.parallel.tp if workload.parallel.sequence_parallel else 1
    return _gathered_bytes(workload) // shared
