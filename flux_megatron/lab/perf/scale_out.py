"""Collectives over nodes of one GPU each, on a switch or a torus.

Every node has two links, one in each direction, for each dimension of a torus, and one on a switch.
Chunks of a collective are in all dimensions at once, so the slowest dimension decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from flux_megatron.launch.workload import Count, FromZero, Positive


@dataclass(frozen=True)
class Network:
    """`shape` are the dimensions of the torus; of a switch it is the number of ports.
    `bandwidth_gbps` is one link's in one direction, in GB/s, `efficiency` the share that
    collectives get of it, `latency_us` that of a hop, `message_us` what a card needs for a message
    beside its bytes.
    """

    kind: Literal["torus", "switch"]
    nodes: Annotated[int, Field(ge=2)]
    shape: tuple[Count, ...]
    bandwidth_gbps: Positive
    latency_us: FromZero
    efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    message_us: FromZero = 0.0

    @property
    def link_gbps(self) -> float:
        return self.bandwidth_gbps * self.efficiency

    @property
    def hops_us(self) -> float:
        """Between the nodes that are furthest apart."""
        ways = sum(size // 2 for size in self.shape) if self.kind == "torus" else 1
        return max(1, ways) * self.latency_us


def all_to_all_us(network: Network, size_bytes: float, messages: int = 1) -> float:
    """Each node has `size_bytes`, an equal share for every node and itself, in `messages` to each
    other one.

    A dimension of `n` nodes of a torus carries each byte n / 4 hops in the mean, over two links.
    """
    issued = (network.nodes - 1) * messages * network.message_us
    remote = size_bytes * (network.nodes - 1) / network.nodes
    sent = remote / network.link_gbps
    if network.kind == "torus":
        sent = max(_mean_hops(size) for size in network.shape) * size_bytes / 2 / network.link_gbps
    return network.hops_us + max(issued, sent * 1e-3)


def all_reduce_us(network: Network, size_bytes: float) -> float:
    """Rings: reduce-scatter and all-gather in one dimension after the other, over what is left."""
    if network.kind == "switch":
        return _ring_us(network, size_bytes, network.nodes, links=1)
    total, left = 0.0, size_bytes
    for size in sorted(network.shape, reverse=True):
        total += _ring_us(network, left, size, links=2)
        left /= size
    return total


def _ring_us(network: Network, size_bytes: float, nodes: int, links: int) -> float:
    rounds = 2 * (nodes - 1)
    moved = rounds / nodes * size_bytes
    return rounds * network.latency_us + moved / links / network.link_gbps * 1e-3


def _mean_hops(size: int) -> float:
    """Between two nodes of a ring, themselves included, the shorter way."""
    return sum(min(step, size - step) for step in range(size)) / size
