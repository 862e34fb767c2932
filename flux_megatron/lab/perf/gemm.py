"""The time of a library's GEMM, of wgrad that adds to a gradient, and of passes over memory."""

from __future__ import annotations

import math

from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.launch.workload import ELEMENT_BYTES, FP8

# Fitted to 4 x H200's operations of 2026-11-21 (TP 4, bf16): the share of a GPU's full-wave rate
# that the main loop of a library's tile reaches, and the time of a wave of tiles beside it.
GEMM_RATE, TILE_US = 0.9913, 1.75
# Adding wgrad to an fp32 gradient costs ACCUMULATE times the traffic, divided by 1 + HIDDEN x GEMM
# time / traffic time.
ACCUMULATE, HIDDEN = 1.325, 0.3187
# The tiles that a library chooses from, and the share of the peak rate that each can reach.
TILES = {
    (128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.96, (128, 128): 0.9,
    (64, 256): 0.85, (64, 128): 0.75, (64, 64): 0.5,
}  # fmt: skip

# Of the rate of FP8, what is left where the products are added up in fp32 registers: fitted as
# `hardware.H200.tflops` of FP8.
SPLIT_ACCUMULATOR = 0.94

# A library can also use split-K, so that no SM idles in the last wave: the partials cost a share of
# the work, and the fix-up a constant time.
SPLIT_K_SHARE = 1.08
SPLIT_K_US = 4.0


def gemm_us(
    hardware: Hardware, M: int, N: int, K: int, dtype: str, split_accumulator: bool = False
) -> float:
    """The library's [M, K] @ [K, N]: waves of the best tile, not faster than memory allows. FP8
    has results of 16 bits.
    """
    tflops = hardware.tflops.get(dtype, hardware.tflops["float32"])
    tflops *= SPLIT_ACCUMULATOR if split_accumulator else 1.0
    element = ELEMENT_BYTES[dtype]
    rate = GEMM_RATE * tflops * 1e6 / hardware.sms
    times = []
    for (rows, columns), share in TILES.items():
        waves = math.ceil(M / rows) * math.ceil(N / columns) / hardware.sms
        tile_us = 2 * rows * columns * K / (rate * share) + TILE_US
        times.append(min(math.ceil(waves) * tile_us, waves * tile_us * SPLIT_K_SHARE + SPLIT_K_US))
    return max(
        hardware.launch_us + min(times),
        pass_us(hardware, (M * K + K * N) * element + M * N * max(2, element)),
    )


def wgrad_us(hardware: Hardware, N: int, K: int, M: int, dtype: str) -> float:
    """dy[M, N]^T @ x[M, K], added to an fp32 gradient, which is read and written.

    The longer the SMs multiply between two tiles, the more of that traffic is hidden.
    """
    gemm = gemm_us(hardware, N, K, M, dtype, dtype == FP8)
    if dtype == "float32":
        return gemm
    traffic = 8 * N * K / hardware.memory_gbps * 1e-3
    return gemm + ACCUMULATE * traffic / (1 + HIDDEN * gemm / traffic)


def pass_us(hardware: Hardware, size_bytes: float, kernels: int = 1) -> float:
    """Kernels that together read and write so many bytes of memory and do little else."""
    return kernels * hardware.launch_us + size_bytes / hardware.memory_gbps * 1e-3
