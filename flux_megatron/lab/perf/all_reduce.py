"""The time of NCCL's all-reduce, and how much of it a column layer's backward leaves exposed.

NCCL has a protocol for few bytes, of little latency and half the rate, and takes the faster one.
The numbers are those of `all_reduce_fits`: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flux_megatron.lab.perf.hardware import Hardware


class Protocol(NamedTuple):
    """`share` is that of the link's rate, as all-gathers reach it."""

    latency_us: float
    share: float


PROTOCOLS = (Protocol(8.6, 0.46), Protocol(23.6, 0.94))
# By CUDA_DEVICE_MAX_CONNECTIONS, of an all-reduce beside wgrad, where wgrad is longer: with 1 it
# is enqueued before wgrad and gets its SMs first.
EXPOSED = {"unset": 0.79, "1": 0.12}


def moved_bytes(size_bytes: float, world_size: int) -> float:
    """What each rank sends in an all-reduce of `size_bytes`: a reduce-scatter, an all-gather."""
    return 2 * size_bytes * (world_size - 1) / world_size


def all_reduce_us(
    hardware: Hardware, size_bytes: float, world_size: int,
    protocols: Sequence[Protocol] = PROTOCOLS,
) -> float:  # fmt: skip
    """NCCL's all-reduce of `size_bytes`, which each rank has."""
    moved = moved_bytes(size_bytes, world_size)
    return min(
        one.latency_us + moved / (one.share * hardware.nccl_gbps) * 1e-3 for one in protocols
    )


def exposed_share(connections: str) -> float:
    """By the value of CUDA_DEVICE_MAX_CONNECTIONS, or "unset"."""
    return EXPOSED["1" if connections == "1" else "unset"]
