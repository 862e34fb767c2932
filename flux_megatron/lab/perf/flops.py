"""The floating-point operations of a step, and the share of the GPUs' peak that they are (MFU).

The count covers what the model needs, however it is implemented: every GEMM once in forward and
twice in backward, attention over the causal half of its scores, the logits over `vocab` unpadded
tokens. It leaves out recomputed activations, norms, softmax and optimizer. Megatron's
--log-throughput counts the same and the padding of the vocabulary.
"""

from __future__ import annotations

from flux_megatron.launch.workload import Cluster, Workload

# Dense TFLOP/s of the tensor cores in 16 bits and of the CUDA cores in float32: data sheets of A100
# and of H100 SXM, from which H800 and H200 differ in links and memory alone.
_A100 = {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}
_HOPPER = {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0}
PEAK_TFLOPS = {"A100": _A100, "H100": _HOPPER, "H800": _HOPPER, "H200": _HOPPER}


def model_flops(workload: Workload) -> float:
    """Of one step: forward and backward of the whole global batch, on all GPUs together."""
    model = workload.model
    channels = model.hidden // model.heads
    attention = model.hidden + model.kv_heads * channels  # qkv and proj: 2 (h + kv) columns of h
    matrices = 2 * attention + (3 if model.swiglu else 2) * model.ffn
    # scores, and their GEMM with the values: s / 2 keys for the mean token, twice
    layer = model.hidden * (matrices + model.seq_length)
    per_token = model.layers * layer + model.hidden * model.vocab
    return 3.0 * 2 * per_token * model.seq_length * workload.training.global_batch


def peak_tflops(cluster: Cluster, dtype: str) -> float | None:
    """One GPU's, by its data sheet; None for unknown GPUs and for the CPU."""
    return PEAK_TFLOPS.get(cluster.gpu.split("-")[0].upper(), {}).get(dtype)


def mfu(workload: Workload, step_s: float) -> float | None:
    """Model FLOPs utilisation, 0 to 1; None where the peak is unknown, and with experts."""
    peak = peak_tflops(workload.cluster, workload.training.dtype)
    if peak is None or workload.model.experts:
        return None
    return model_flops(workload) / (step_s * workload.parallel.world_size * peak * 1e12)
