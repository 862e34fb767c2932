"""Core attention of one micro-batch on one GPU: flash kernels, or GEMMs and a softmax in memory."""

from __future__ import annotations

from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.launch.workload import ELEMENT_BYTES, Workload


def core_us(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) of scores, softmax and weighted sum, causal, without dropout."""
    core = _flash_us if workload.training.flash_attention else _unfused_us
    rope = _rope_us(workload, hardware)
    forward, backward = core(workload, hardware)
    return forward + rope, backward + rope


def _flash_us(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """Two GEMMs in forward and five in backward; a causal mask halves them."""
    heads, head_size = _heads(workload)
    flops = 2 * workload.tokens * workload.model.seq_length * head_size * heads
    peak = hardware.peak_tflops * 1e6
    return (
        hardware.launch_us + flops / (peak * hardware.flash_forward),
        hardware.launch_us + 2.5 * flops / (peak * hardware.flash_backward),
    )


def _unfused_us(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """Whole matrices of scores, and one kernel that scales, masks and takes the softmax: it reads
    and writes them; backward reads two and writes one.
    """
    heads, head_size = _heads(workload)
    s, dtype = workload.model.seq_length, workload.training.dtype
    gemms = heads * workload.training.micro_batch  # of each kind
    both = sum(
        gemms * (gemm_us(hardware, s, N, K, dtype) - hardware.launch_us)
        for N, K in ((s, head_size), (head_size, s))
    )
    scores = gemms * s * s * ELEMENT_BYTES[dtype]
    return (
        both + pass_us(hardware, 2 * scores, kernels=3),
        2 * both + pass_us(hardware, 3 * scores, kernels=5),
    )


def _rope_us(workload: Workload, hardware: Hardware) -> float:
    """Queries and keys turned: each is read and written."""
    if workload.model.position != "rope":
        return 0.0
    heads, head_size = _heads(workload)
    keys = workload.model.kv_heads // workload.parallel.tp
    elements = workload.tokens * (heads + keys) * head_size
    return pass_us(hardware, 2 * elements * ELEMENT_BYTES[workload.training.dtype], kernels=2)


def _heads(workload: Workload) -> tuple[int, int]:
    """Heads of this GPU, and the size of one."""
    model = workload.model
    return model.heads // workload.parallel.tp, model.hidden // model.heads
