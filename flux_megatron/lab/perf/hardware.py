"""Facts of the GPUs that the cost model knows, each with its source.

Measured numbers are of 4 x H200 over NVLink 4 (torch 2.11, CUDA 13, NCCL 2.28.9, multicast off).
The other GPUs have the ratio of measurement to data sheet that the H200 has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flux_megatron.errors import BadInput
from flux_megatron.lab.perf.flops import PEAK_TFLOPS
from flux_megatron.launch.workload import FP8, Cluster, Link, Nics


@dataclass(frozen=True)
class Hardware:
    """One GPU of a node, and the link by which it reaches the node's other GPUs.

    `tflops` is what a GEMM of full waves reaches, by dtype, `peak_tflops` the data sheet's for
    dense bf16; bandwidths are one GPU's in one direction; `nccl_*` describe an all-gather or
    reduce-scatter by the bytes a rank receives; `flash_*` are shares of the peak that a flash
    attention kernel reaches.
    """

    name: str
    sms: int
    tflops: Mapping[str, float]
    memory_gbps: float
    copy_gbps: float
    copy_latency_us: float
    nccl_gbps: float
    nccl_latency_us: float
    store_gbps: float
    launch_us: float
    peak_tflops: float
    flash_forward: float
    flash_backward: float
    sustained: float = 1.0  # share of the GEMMs' rate that is left in a training step
    hopper: bool = True  # whether the kernels for sm_90 run; the portable ones run anywhere
    peers: bool = True  # whether a GPU reaches the others' memory
    mailboxes: bool = False  # whether they join GPUs that do not, for `hopper`; else NCCL alone


# FP8: fitted to the 32 GEMMs of docs/results/h200x2/fp8_operations.jsonl, which it makes 4 % too
# short to 4 % too long; tests/perf/test_fp8_predictions.py compares.
# GEMM: 8192 x 12288 x 12288 in 3024 us is 24 waves of 128 x 256 tiles at 840 TFLOP/s. Memory: the
# sum of 4 partials. Copy engine: pushes of 256 MiB; 1 to 64 MiB cost 10.5 us more than their bytes.
# NCCL: a line through 48, 189, 501 us for 8, 64, 192 MiB. Stores: 150 MB into peers from a GEMM's
# epilogue cost 95 to 130 us beside the GEMM. float32: CUDA cores, 80 % of the data sheet.
# Attention: FlashAttention-3 (arXiv 2407.08608) says that FlashAttention-2 reaches 35 % of an H100;
# its backward, by the ratio of backward to forward in FlashAttention-2 (arXiv 2307.08691), 30 %.
# Sustained: in steps of M = 8192, at 642 of 700 W, GEMMs took 272 and 245 ms instead of 244 and 223
# (docs/results/h200x2/breakdown.jsonl); GEMMs alone fall to 0.85 of a burst's rate.
H200 = Hardware(
    name="H200",
    sms=132,
    tflops={FP8: 1600.0, "bfloat16": 840.0, "float16": 840.0, "float32": 53.0},
    memory_gbps=4000.0,
    copy_gbps=386.0,
    copy_latency_us=10.5,
    nccl_gbps=323.0,
    nccl_latency_us=32.0,
    store_gbps=1350.0,
    launch_us=4.0,
    peak_tflops=PEAK_TFLOPS["H200"]["bfloat16"],
    flash_forward=0.35,
    flash_backward=0.3,
    sustained=0.9,
)
H200_MEMORY_GBPS = 4800.0  # data sheet
H200_LINK = Link("nvlink", 450.0)  # data sheet: NVLink 4, 900 GB/s in both directions

# What PCIe gives of a slot's bandwidth to a ring over all GPUs of a node with two sockets, for NCCL
# and copy engines alike: both are bound by the slots and by the way between the sockets. An
# assumption between what is public: 8 GPUs L20 7.9 GB/s with NCCL and at least 15 with FLUX's
# copies (table in the README of bytedance/flux: 88 MB in 11.2 ms, and hidden in 5.9 ms); A100 that
# have to leave their NVLink pair 20 GB/s (NVIDIA/nccl-tests issue 178), all of 32 GB/s.
PCIE_RING_SHARE = 0.5


def like_h200(
    name: str, sms: int, peaks: Mapping[str, float], memory_gbps: float, link: Link,
    *, flash: tuple[float, float] = (0.35, 0.3), hopper: bool = True, clock: float = 1.0,
) -> Hardware:  # fmt: skip
    """A GPU by its data sheet, at the H200's ratios, with `clock` times the sheet's clock."""
    tflops = peaks["bfloat16"] * clock * H200.tflops["bfloat16"] / H200.peak_tflops
    rates = {"bfloat16": tflops, "float16": tflops, "float32": 0.8 * peaks["float32"] * clock}
    if hopper:
        rates[FP8] = tflops * H200.tflops[FP8] / H200.tflops["bfloat16"]
    hardware = replace(
        H200,
        name=name,
        sms=sms,
        tflops=rates,
        memory_gbps=memory_gbps * H200.memory_gbps / H200_MEMORY_GBPS,
        peak_tflops=peaks["bfloat16"],
        flash_forward=flash[0] * clock,
        flash_backward=flash[1] * clock,
        # published bursts on A800 are 5 % above these ratios (FLUX's README)
        sustained=H200.sustained if hopper else 1.0,
        hopper=hopper,
    )
    return _linked(hardware, link)


def _linked(hardware: Hardware, link: Link) -> Hardware:
    """The same GPU on another link: latencies stay, bandwidths follow the link's."""
    share = link.bandwidth_gbps / H200_LINK.bandwidth_gbps
    copy, nccl = H200.copy_gbps * share, H200.nccl_gbps * share
    if link.kind == "pcie":
        copy = nccl = PCIE_RING_SHARE * link.bandwidth_gbps
    if link.kind == "host":
        boxes = hardware.hopper
        return replace(hardware, nccl_gbps=link.bandwidth_gbps, peers=False, mailboxes=boxes)
    return replace(hardware, copy_gbps=copy, nccl_gbps=nccl, store_gbps=H200.store_gbps * share)


# The H100 has the SMs and links of the H200 with other memory: HBM3 of 3.35 TB/s instead of HBM3e
# of 4.8 (NVIDIA H100 SXM data sheet). The H800 is an H100 whose NVLink has 400 of 900 GB/s (the
# FLUX paper).
H100 = like_h200("H100", 132, PEAK_TFLOPS["H100"], 3350.0, H200_LINK)
H800 = like_h200("H800", 132, PEAK_TFLOPS["H800"], 3350.0, Link("nvlink", 200.0))

# NVIDIA A100 SXM 80 GB and A100 80 GB PCIe data sheets. FlashAttention-2 on A100 (arXiv
# 2307.08691): 50 to 73 % of the peak, backward the lower end.
_A100: dict[str, Any] = {"flash": (0.6, 0.5), "hopper": False}
A100 = like_h200("A100", 108, PEAK_TFLOPS["A100"], 2039.0, Link("nvlink", 300.0), **_A100)
# The card has 300 instead of 400 W. 90 % of the SXM module is what NVIDIA announced in June 2020 of
# the first A100 card, of 250 W.
A100_PCIE = like_h200(
    "A100-PCIE", 108, PEAK_TFLOPS["A100"], 1935.0, Link("pcie", 32.0), **_A100, clock=0.9
)

GPUS = (H200, H100, H800, A100)


NIC_EFFICIENCY = 0.9  # assumed: what NCCL gets of a card's data rate with large messages


def share_gbps(nics: Nics, gpus: int) -> float:
    """What one of `gpus` that send at the same time gets of a node's cards, in GB/s."""
    return NIC_EFFICIENCY * nics.bandwidth_gbps * min(1.0, nics.count / gpus)


def of(cluster: Cluster, tp: int = 1) -> Hardware:
    """The facts of a cluster's GPU on its link; of ranks on several nodes, on their cards.
    `BadInput` for an unknown one.
    """
    tokens = set(re.split(r"[^A-Z0-9]+", cluster.gpu.upper()))
    hardware = next((known for known in GPUS if known.name in tokens), None)
    if {"A100", "PCIE"} <= tokens:
        hardware = A100_PCIE
    if hardware is None or cluster.link.kind == "memory":
        known = ", ".join(known.name for known in (*GPUS, A100_PCIE))
        raise BadInput(
            f"cluster {cluster.name}: gpu {cluster.gpu!r} on {cluster.link.kind} given, one of "
            f"{known} on nvlink, pcie or host expected"
        )
    hardware, nics = _linked(hardware, cluster.link), cluster.nics
    if tp <= cluster.gpus_per_node or nics is None:
        return hardware
    # a ring enters and leaves each node once, and several have all of its cards
    cards = cluster.gpus_per_node * share_gbps(nics, cluster.gpus_per_node)
    latency_us = hardware.nccl_latency_us + nics.latency_us * tp / cluster.gpus_per_node
    gbps = min(hardware.nccl_gbps, cards)
    joined = replace(hardware, nccl_gbps=gbps, nccl_latency_us=latency_us)
    return replace(joined, peers=False, mailboxes=False)


def in_training(cluster: Cluster, tp: int = 1) -> Hardware:
    """The same under the load of a training step, at its clocks. `BadInput` as `of`."""
    hardware = of(cluster, tp)
    rates = {dtype: rate * hardware.sustained for dtype, rate in hardware.tflops.items()}
    return replace(hardware, tflops=rates)
