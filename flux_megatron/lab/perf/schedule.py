"""Pipeline schedules: the times of the parts of a step.

1F1B, and with several chunks of layers on each rank its interleaved form (Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters, 2021), as Megatron runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Times = tuple[float, ...]
Buckets = tuple[tuple[Times, ...], ...]  # [rank][chunk][bucket]


@dataclass(frozen=True)
class Costs:
    """The times of the parts of a step, in microseconds, by pipeline rank and chunk of layers.

    A rank's replicas sum its gradients and gather its parameters in buckets, one after another.
    `send_us[r]`: a micro-batch from rank r to the next one, or its gradient back.
    """

    micro_batches: int
    forward_us: tuple[Times, ...]  # [rank][chunk]
    backward_us: tuple[Times, ...]  # [rank][chunk]
    send_us: Times  # [rank]
    reduce_us: Buckets
    gather_us: Buckets
    optimizer_us: Times  # [rank]
    tied_us: float = 0.0  # the tied table's gradient between the first and the last rank
    overlap_reduce: bool = False  # with the last backward
    overlap_gather: bool = False  # with the first forward

    @property
    def pp(self) -> int:
        return len(self.forward_us)

    @property
    def chunks(self) -> int:
        return len(self.forward_us[0])

    def busy_us(self, rank: int) -> float:
        return sum(self.forward_us[rank]) + sum(self.backward_us[rank])


class Parts(NamedTuple):
    """The times of a step in microseconds, each beyond those before it: the busiest rank's
    computation, its pipeline bubble, sends, data-parallel communication and the optimizer.
    """

    compute_us: float
    bubble_us: float
    pp_us: float
    dp_us: float
    optimizer_us: float

    @property
    def step_us(self) -> float:
        return sum(self)


def closed_form(costs: Costs) -> Parts:
    """Exact for equal ranks whose sends take less than a forward; else close, see
    docs/reference/cost_model.md.
    """
    busy = [costs.busy_us(rank) for rank in range(costs.pp)]
    bubble = (sum(busy) - max(busy)) / costs.chunks
    dp, optimizer = _gather_us(costs) + _reduce_us(costs), max(costs.optimizer_us)
    return Parts(costs.micro_batches * max(busy), bubble, _sends_us(costs), dp, optimizer)


def _sends_us(costs: Costs) -> float:
    """The sends of the first micro-batch through all layers and of the last one back; without
    interleaving also two sends, or with two ranks one, in every turn of a forward and a backward.
    """
    between = costs.send_us[: costs.pp - 1]
    around = costs.send_us[-1] * (costs.chunks - 1)
    there_and_back = 2 * (costs.chunks * sum(between) + around)
    if costs.chunks > 1 or costs.micro_batches == 1 or costs.pp == 1:
        return there_and_back
    # a turn of a rank that has two neighbours: the first of its sends is on the way already
    beside = [sum(between[max(0, rank - 1) : rank + 1]) for rank in range(costs.pp)]
    busy = [costs.busy_us(rank) for rank in range(costs.pp)]
    turn_us, rank = max((busy[r] + beside[r], r) for r in range(costs.pp))
    already_us = between[rank] if 0 < rank < costs.pp - 1 else 0.0
    return there_and_back + (costs.micro_batches - 1) * (turn_us - max(busy)) - already_us


def _gather_us(costs: Costs) -> float:
    """The exposed gather of parameters: after the optimizer, or in the first forwards."""
    gathers = [[time for chunk in rank for time in chunk] for rank in costs.gather_us]
    if not costs.overlap_gather:
        both = (a + sum(b) for a, b in zip(costs.optimizer_us, gathers, strict=True))
        return max(both) - max(costs.optimizer_us)
    late_us = 0.0
    for rank in range(costs.pp):
        arrived_us = 0.0
        for chunk, buckets in enumerate(costs.gather_us[rank]):
            forward_us = costs.forward_us[rank][chunk]
            begin_us = _way_us(costs, costs.forward_us, rank, chunk)
            for bucket, time_us in enumerate(buckets):
                arrived_us += time_us
                late_us = max(late_us, arrived_us - begin_us - forward_us * bucket / len(buckets))
    return late_us


def _reduce_us(costs: Costs) -> float:
    """The exposed reduction of gradients after the pipeline, which ends on the first rank."""
    ends_us = []
    for rank in range(costs.pp):
        done_us = -_way_us(costs, costs.backward_us, rank, 0)
        if costs.chunks == 1 and rank and not costs.overlap_reduce:
            done_us += costs.send_us[rank - 1]  # during which the rank waits
        end_us = -float("inf")
        for chunk in reversed(range(costs.chunks)):
            buckets = costs.reduce_us[rank][chunk]
            for bucket, time_us in enumerate(buckets, start=1):
                left_us = costs.backward_us[rank][chunk] * (1 - bucket / len(buckets))
                ready_us = -_way_us(costs, costs.backward_us, rank, chunk) - left_us
                end_us = max(end_us, ready_us if costs.overlap_reduce else done_us) + time_us
        ends_us.append(end_us)
    if costs.tied_us:
        ends_us.append(max(ends_us[0], ends_us[-1], 0.0) + costs.tied_us)
    return max(0.0, *ends_us)


def _way_us(costs: Costs, times: tuple[Times, ...], rank: int, chunk: int) -> float:
    """The time of a micro-batch from the first layers to those of a rank and chunk, or back."""
    before = (divmod(place, costs.pp) for place in range(chunk * costs.pp + rank))
    return sum(times[r][c] + costs.send_us[r] for c, r in before)
