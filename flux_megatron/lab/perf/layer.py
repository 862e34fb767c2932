"""The time of one transformer layer on one GPU for one micro-batch: by piece, forward and backward.

Linear layers come from `linear`; beside attention the rest is bound by memory. Times are
microseconds and include the tensor-parallel communication that stays exposed. Every function raises
`BadInput` for a cluster without a GPU that `hardware` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flux_megatron.lab.perf import linear, quantization
from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import H200, Hardware, in_training
from flux_megatron.launch.workload import ELEMENT_BYTES, Workload

# Measured over the least: what traces of stock Megatron's norms, activations and other small
# kernels took beside one read and write of each tensor: 3.2 and 4.1 (GPT-3 at M = 2048 and 8192),
# 1.9 and 2.3 (Llama-2), geometric mean (docs/results/h200x2/breakdown.jsonl). There are gradients
# of Q, K and V to be joined, casts, copies before attention, sums for biases, kernels not fused.
UNFUSED = 2.7
# No kernel runs while the host catches up after the synchronisations of a step, whatever M: 8.2 to
# 14.5 ms in the same traces.
HOST_US = 9000.0
# What TransformerEngine's userbuffers add to a layer beside its linear operations. Rows of single
# operations do not show it: measured steps with `--tp-comm-overlap` are up to 9 ms longer than
# those rows make them. Fitted to docs/results/h200x2/iterations.jsonl and h200x4/iterations.jsonl
# (TransformerEngine 2.11); tests/perf/test_accuracy.py compares: us of a layer and micro-batch,
# and, in models with biases, of each GB of an [M, ffn / tp] tensor.
USERBUFFERS = "userbuffers"
USERBUFFERS_US, USERBUFFERS_US_BY_GB = 306.44, 5378.1


class Piece(NamedTuple):
    """A piece of the model on one GPU; times include the exposed communication."""

    name: str
    forward_us: float
    backward_us: float
    forward_exposed_us: float = 0.0
    backward_exposed_us: float = 0.0


def pieces(workload: Workload) -> list[Piece]:
    """One transformer layer in the order of its forward: qkv, attention, proj, fc1, activation,
    fc2; then norms, the layer's two with its two residual adds; of arm te what userbuffers add.
    """
    model = workload.model
    qkv = (model.heads + 2 * model.kv_heads) * model.hidden // model.heads
    sizes = {
        "qkv": (qkv, model.hidden), "proj": (model.hidden, model.hidden),
        "fc1": (model.fc1_width, model.hidden), "fc2": (model.hidden, model.ffn),
    }  # fmt: skip
    linears = {name: _linear(workload, name, *NK) for name, NK in sizes.items()}
    return [
        linears["qkv"],
        _attention(workload),
        linears["proj"],
        linears["fc1"],
        _activation(workload),
        linears["fc2"],
        _norms(workload),
        *_userbuffers(workload),
        *_quantization(workload, sizes),
    ]


def _gpu(workload: Workload) -> Hardware:
    """On the link of its tensor-parallel group."""
    return in_training(workload.cluster, workload.parallel.tp)


def _attention(workload: Workload) -> Piece:
    """Scores, softmax and weighted sum, causal, without dropout: by a flash kernel, of two GEMMs in
    forward and five in backward, which a causal mask halves; or by whole matrices of scores, which
    a kernel that scales, masks and takes the softmax reads and writes; in backward it reads two and
    writes one. Before that queries and keys are turned by rope, each read and written.
    """
    model, tp, dtype = workload.model, workload.parallel.tp, workload.training.dtype
    hardware = _gpu(workload)
    heads, head_size, s = model.heads // tp, model.hidden // model.heads, model.seq_length
    if workload.training.flash_attention:
        us = 2 * workload.tokens * s * head_size * heads / (hardware.peak_tflops * 1e6)
        forward = hardware.launch_us + us / hardware.flash_forward
        backward = hardware.launch_us + 2.5 * us / hardware.flash_backward
    else:
        gemms = heads * workload.training.micro_batch  # of each kind
        both = sum(
            gemms * (gemm_us(hardware, s, N, K, dtype) - hardware.launch_us)
            for N, K in ((s, head_size), (head_size, s))
        )
        scores = gemms * s * s * ELEMENT_BYTES[dtype]
        forward = both + pass_us(hardware, 2 * scores, kernels=3)
        backward = 2 * both + pass_us(hardware, 3 * scores, kernels=5)
    if model.position == "rope":
        elements = workload.tokens * (heads + model.kv_heads // tp) * head_size
        turned = pass_us(hardware, 2 * elements * ELEMENT_BYTES[dtype], kernels=2)
        forward, backward = forward + turned, backward + turned
    return Piece("attention", forward, backward)


def _quantization(workload: Workload, sizes: Mapping[str, tuple[int, int]]) -> list[Piece]:
    """The weights are quantized once a step."""
    recipe, hardware = workload.training.fp8, _gpu(workload)
    if recipe == "none":
        return []
    once = 1 / workload.micro_batches
    layers = [_layer(workload, name, *NK) for name, NK in sizes.items()]
    times = [quantization.cost(layer, recipe, hardware, once) for layer in layers]
    return [Piece("quantization", *map(sum, zip(*times, strict=True)))]


def _linear(workload: Workload, name: str, N: int, K: int, strategy: str | None = None) -> Piece:
    layer = _layer(workload, name, N, K)
    strategy = strategy or linear.STRATEGY[workload.arm]
    return Piece(name, *linear.cost(layer, strategy, _gpu(workload)))


def _layer(workload: Workload, name: str, N: int, K: int) -> linear.Linear:
    column, sizes = name not in ("proj", "fc2"), (workload.tokens, N, K)
    parallel, training = workload.parallel, workload.training
    fp8 = training.fp8 != "none" and name != "head"
    shared = parallel.sequence_parallel
    return linear.Linear(column, *sizes, parallel.tp, training.dtype, shared, fp8)


def _activation(workload: Workload) -> Piece:
    """Bias and GELU, or SwiGLU: what goes in, what comes out, and in backward both gradients."""
    wide = 2 if workload.model.swiglu else 1
    elements = workload.tokens * workload.model.ffn // workload.parallel.tp
    return _passes(workload, "activation", elements, wide + 1, 2 * wide + 1)


def _norms(workload: Workload) -> Piece:
    """Two norms (read, write) and two residual adds (read two, write); in backward a norm reads its
    input and its gradient and writes one, and where branches meet two are read and one written.
    """
    elements = _rows(workload) * workload.model.hidden
    return _passes(workload, "norms", elements, 10, 12, kernels=4)


def _userbuffers(workload: Workload) -> list[Piece]:
    """Half of it in either direction, which the rows do not tell apart. Passes over tensors are as
    fast as the GPU's memory.
    """
    if workload.arm != "te" or workload.parallel.tp == 1:
        return []
    us = USERBUFFERS_US
    if workload.model.linear_bias:
        elements = workload.tokens * workload.model.ffn // workload.parallel.tp
        size_gb = elements * ELEMENT_BYTES[workload.training.dtype] * 1e-9
        memory = H200.memory_gbps / _gpu(workload).memory_gbps
        us += USERBUFFERS_US_BY_GB * memory * size_gb
    return [Piece(USERBUFFERS, us / 2, us / 2)]


def _passes(
    workload: Workload, name: str, elements: int, forward: int, backward: int, kernels: int = 1
) -> Piece:
    """A piece bound by memory: how often it must read or write so many elements, and more."""
    size_bytes = UNFUSED * elements * ELEMENT_BYTES[workload.training.dtype]
    times = (_memory_us(workload, size_bytes * count, kernels) for count in (forward, backward))
    return Piece(name, *times)


def _memory_us(workload: Workload, size_bytes: float, kernels: int = 1) -> float:
    return pass_us(_gpu(workload), size_bytes, kernels)


def _rows(workload: Workload) -> int:
    """Of the stretches between the linear layers, which sequence parallelism shares out."""
    shared = workload.parallel.tp if workload.parallel.sequence_parallel else 1
    return workload.tokens // shared


def embedding(workload: Workload) -> Piece:
    """The lookup, of whose rows every rank has those of its tokens: reduce-scattered, and their
    gradient gathered, with sequence parallelism; all-reduced without.
    """
    rows = workload.gathered_bytes
    table = workload.padded_vocab // workload.parallel.tp * workload.model.hidden
    exchange = _all_reduce_us(workload, rows), 0.0
    if workload.parallel.sequence_parallel:
        one = collective_us(_gpu(workload), rows, workload.parallel.tp)
        exchange = one, one
    # the table's gradient is zeroed, scattered into, and added to the fp32 gradient
    forward, backward = (
        _memory_us(workload, 2 * rows),
        _memory_us(workload, 3 * rows + 12 * table, 3),
    )
    return Piece("embedding", forward + exchange[0], backward + exchange[1], *exchange)


def head(workload: Workload) -> Piece:
    """The final norm, the LM head and the loss over logits that the ranks share by vocabulary.

    `--flux-overlap` takes the LM head too; TransformerEngine's overlap leaves it to Megatron.
    """
    vocab, hidden = workload.padded_vocab, workload.model.hidden
    theirs = "megatron" if workload.arm == "te" else None
    logits_gemm = _linear(workload, "head", N=vocab, K=hidden, strategy=theirs)
    norm = _passes(workload, "norm", _rows(workload) * hidden, 2, 3)
    # logits in fp32: cast, maximum, subtracted in place, exponentials and their sum; in backward
    # the softmax becomes the gradient and is cast back
    logits = workload.tokens * vocab // workload.parallel.tp
    loss = Piece("loss", _memory_us(workload, 26 * logits, 4), _memory_us(workload, 14 * logits, 2))
    # maximum, target's logit and sum of every token are all-reduced
    reduced = 3 * _all_reduce_us(workload, 4 * workload.tokens)
    summed = Piece("", reduced, 0.0, reduced)
    times = zip(*(one[1:] for one in (logits_gemm, norm, loss, summed)), strict=True)
    return Piece("head", *map(sum, times))


def _all_reduce_us(workload: Workload, size_bytes: int) -> float:
    return all_reduce_us(_gpu(workload), size_bytes, workload.parallel.tp)


def optimizer_us(workload: Workload, parameters: int) -> float:
    """Adam on `parameters` that this GPU updates, by bytes of each: the gradients' norm (4), their
    clipping (8) and zeroing (4), a look for NaN (4); gradient, and both ways the fp32 parameter and
    two moments (28); the model's copy. And what the host lets the GPU wait in a step.
    """
    copy = 4 + ELEMENT_BYTES[workload.training.dtype]
    return HOST_US + _memory_us(workload, parameters * (4 + 8 + 4 + 4 + 28 + copy), kernels=6)


def recompute_us(workload: Workload) -> float:
    """The extra time of a layer's backward: core attention again, or its whole forward."""
    full = workload.training.recompute == "full"
    return sum(piece.forward_us for piece in pieces(workload) if full or piece.name == "attention")
