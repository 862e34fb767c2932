"""Facts of the GPUs that the cost model knows, each with its source.

Measured numbers are of 4 x H200 over NVLink 4 (torch 2.11, CUDA 13, NCCL 2.28.9, multicast off).
The other GPUs have the ratio of measurement to data sheet that the H200 has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU of a node whose GPUs all reach each other over NVLink.

    `tflops` is what a GEMM of full waves reaches, by dtype; bandwidths are one GPU's in one
    direction; `nccl_*` describe an all-gather or reduce-scatter by the bytes a rank receives.
    """

    name: str
    multiprocessors: int
    tflops: Mapping[str, float]
    memory_gbps: float
    copy_gbps: float
    copy_latency_us: float
    nccl_gbps: float
    nccl_latency_us: float
    store_gbps: float
    launch_us: float
    source: str


# GEMM: 8192 x 12288 x 12288 in 3024 us is 24 waves of 128 x 256 tiles at 840 TFLOP/s. Memory: the
# sum of 4 partials. Copy engine: pushes of 256 MiB; 1 to 64 MiB cost 10.5 us more than their bytes.
# NCCL: a line through 48, 189, 501 us for 8, 64, 192 MiB. Stores: 150 MB into peers from a GEMM's
# epilogue cost 95 to 130 us beside the GEMM. float32: CUDA cores, 80 % of the data sheet.
H200 = Hardware(
    name="H200",
    multiprocessors=132,
    tflops={"bfloat16": 840.0, "float16": 840.0, "float32": 53.0},
    memory_gbps=4000.0,
    copy_gbps=386.0,
    copy_latency_us=10.5,
    nccl_gbps=323.0,
    nccl_latency_us=32.0,
    store_gbps=1350.0,
    launch_us=4.0,
    source="measured on 4 x H200",
)

# The H200's multiprocessors and links; HBM3 of 3.35 TB/s instead of HBM3e of 4.8 TB/s.
H100 = Hardware(
    name="H100",
    multiprocessors=132,
    tflops=H200.tflops,
    memory_gbps=2790.0,
    copy_gbps=H200.copy_gbps,
    copy_latency_us=H200.copy_latency_us,
    nccl_gbps=H200.nccl_gbps,
    nccl_latency_us=H200.nccl_latency_us,
    store_gbps=H200.store_gbps,
    launch_us=H200.launch_us,
    source="NVIDIA H100 SXM data sheet, at the H200's ratios",
)

# 312 of 989 dense bf16 TFLOP/s, 19.5 in float32, 2.04 TB/s, NVLink 3 with 300 of 450 GB/s.
A100 = Hardware(
    name="A100",
    multiprocessors=108,
    tflops={"bfloat16": 265.0, "float16": 265.0, "float32": 15.6},
    memory_gbps=1700.0,
    copy_gbps=257.0,
    copy_latency_us=H200.copy_latency_us,
    nccl_gbps=215.0,
    nccl_latency_us=H200.nccl_latency_us,
    store_gbps=900.0,
    launch_us=H200.launch_us,
    source="NVIDIA A100 SXM 80 GB data sheet, at the H200's ratios",
)

GPUS = (H200, H100, A100)


def find(gpu: str, link: str) -> Hardware | None:
    """The facts of a GPU by the name its driver gives, or None where there is no cost model.

    There is none for GPUs that nobody described, for other links than NVLink, and for the CPU,
    where kernels are emulated and their times mean nothing.
    """
    words = re.split(r"[^A-Z0-9]+", gpu.upper())
    known = (hardware for hardware in GPUS if hardware.name in words)
    return next(known, None) if link == "nvlink" else None
