"""The times of NCCL's collectives within a node.

NCCL has a protocol for few bytes, of little latency and a part of the rate, and takes the faster
one.
"""

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf.hardware import Hardware


class Protocol(NamedTuple):
    """`share` is that of the link's rate, as all-gathers reach it."""

    latency_us: float
    share: float


ALL_REDUCE = (Protocol(8.6, 0.46), Protocol(23.6, 0.94))
# Through host memory an all-reduce takes 1.72 to 1.81 times a reduce-scatter of as many bytes (2 x
# H200, h200x2/machines.jsonl of 2026-11-29).
THROUGH_HOST = Protocol(23.6, 1.13)
# All-gather and reduce-scatter: 9 % off in the median, of .03 to 2 MB that a rank receives
# (2 x H200, 2026-11-24, few_rows_bench.jsonl).
FEW_BYTES = Protocol(latency_us=7.0, share=0.37)


def collective_us(hardware: Hardware, size_bytes: int, world_size: int) -> float:
    """An all-gather to, or reduce-scatter of, `size_bytes` on each rank."""
    protocols = FEW_BYTES, Protocol(hardware.nccl_latency_us, 1.0)
    return _fastest_us(hardware, size_bytes * (world_size - 1) / world_size, protocols)


def all_reduce_us(hardware: Hardware, size_bytes: float, world_size: int) -> float:
    """An all-reduce of `size_bytes`, which each rank has: there and back."""
    protocols = ALL_REDUCE if hardware.peers else (ALL_REDUCE[0], THROUGH_HOST)
    return _fastest_us(hardware, 2 * size_bytes * (world_size - 1) / world_size, protocols)


def _fastest_us(hardware: Hardware, moved_bytes: float, protocols: tuple[Protocol, ...]) -> float:
    if not moved_bytes:  # of one rank
        return 0.0
    return min(
        one.latency_us + moved_bytes / (one.share * hardware.nccl_gbps) * 1e-3 for one in protocols
    )
