"""What virtual ranks compute where a token travels once: calls with new tokens and new choices each
time, in the same memory, so a replay of a graph finds other ones. Inputs are overwritten as soon as
the calls allow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from virtual_hosts import VirtualCase, VirtualHost, run_hosts
from virtual_machine import Machine, PackageCopy
from virtual_ranks import Schedule, Scheduler

from flux_megatron.lab import reference

K, N = 12, 20
CHANNELS = ("token routes", "tokens sent", "tokens given back")


@dataclass(frozen=True)
class TokenCase(VirtualCase):
    """Each of `tokens` of a rank chooses up to `topk` of all experts."""

    host: str = "tokens"
    world_size: int = 2
    experts: int = 3
    topk: int = 2
    tokens: int = 7
    calls: int = 3
    ctas: int = 3  # of a persistent kernel
    captured: bool = False  # two calls of three are replays of a graph
    slots: int = 64  # of a rank, so that few tiles share signals
    reverse: bool = False  # rows of the last expert come first

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        machine = Machine(package, self.world_size, self.ctas, CHANNELS)
        small = {"ROUTE_ROWS": 4, "ROWS": 4, "COLUMNS": 8, "CTAS_OF_AN_SM": 1}
        with (
            mock.patch.multiple(package.token_call, **small),
            mock.patch.object(package.signals, "MAX_COMM_TILES", self.slots),
            mock.patch.object(package.token_routes, "COUNTS", tl.constexpr(4)),  # one block's
        ):
            return run_hosts(Host, self, Operands(self), machine, schedule)


class Operands:
    """Of every call and rank: choices [T, R E] with their weights, x [T, K], rows and their
    gradients [capacity, N], [capacity].
    """

    def __init__(self, case: TokenCase) -> None:
        self.case, made = case, torch.Generator().manual_seed(0)
        ranks, every = range(case.world_size), case.world_size * case.experts
        self.capacity = case.world_size * case.tokens * min(case.topk, case.experts)

        def integers(*shape: int) -> list[list[Tensor]]:
            return [
                [torch.randint(-4, 5, shape, generator=made).float() for _ in ranks]
                for _ in range(case.calls)
            ]

        def choices() -> Tensor:
            ranked = torch.rand(case.tokens, every, generator=made).argsort(1).argsort(1)
            wanted = torch.randint(0, case.topk + 1, (case.tokens, 1), generator=made)
            return ranked < wanted

        self.chosen = [[choices() for _ in ranks] for _ in range(case.calls)]
        self.weights, self.x = integers(case.tokens, every), integers(case.tokens, K)
        self.z, self.gradients = integers(self.capacity, N), integers(self.capacity)

    def came(self, call: int, rank: int) -> int:
        return sum(self._sizes(call, rank))

    def expected(self, what: str, call: int) -> list[Tensor]:
        chosen, ranks = self.chosen[call], range(self.case.world_size)
        if what == "rows":
            rows = reference.send_tokens(self.x[call], chosen)
            return [self._as_they_lie(one, call, rank) for rank, one in enumerate(rows)]
        if what == "weights":
            rows = reference.weights_of_rows(self.weights[call], chosen)
            return [self._as_they_lie(one, call, rank) for rank, one in enumerate(rows)]
        z, gradients = (
            [self._by_expert(given[call][rank], call, rank) for rank in ranks]
            for given in (self.z, self.gradients)
        )
        if what == "y":
            return reference.give_back_tokens(z, chosen)
        weights = [one.clone().requires_grad_() for one in self.weights[call]]
        torch.autograd.backward(reference.weights_of_rows(weights, chosen), gradients)
        return [one.grad for one in weights]

    def _as_they_lie(self, rows: Tensor, call: int, rank: int) -> Tensor:
        """Rows that are sorted by expert, in the order of this case."""
        sizes = self._sizes(call, rank)
        pieces = rows.split(sizes)
        return torch.cat(pieces[::-1]) if self.case.reverse else rows

    def _by_expert(self, rows: Tensor, call: int, rank: int) -> Tensor:
        """Rows in the order of this case, sorted by expert."""
        sizes = self._sizes(call, rank)
        rows = rows[: sum(sizes)]
        return torch.cat(rows.split(sizes[::-1])[::-1]) if self.case.reverse else rows

    def _sizes(self, call: int, rank: int) -> list[int]:
        own = range(rank * self.case.experts, (rank + 1) * self.case.experts)
        return [int(sum(one[:, e].sum() for one in self.chosen[call])) for e in own]


class Host(VirtualHost):
    OPERANDS = ("chosen", "weights", "x", "z", "gradients")

    def step(
        self, call: int, chosen: Tensor, weights: Tensor, x: Tensor, z: Tensor, gradients: Tensor
    ) -> dict[str, Tensor]:
        once, case, space = self.machine.package.once_calls, self.case, self.space
        routes, of_rows = once.routed(
            weights, chosen, space, case.topk, self.operands.capacity, case.reverse
        )
        return {
            "rows": once.sent(x, routes, space), "weights": of_rows,
            "y": once.given_back(z, routes, space),
            "dweights": once.returned(gradients, routes, weights, space),
        }  # fmt: skip

    def known(self, what: str, kept: Tensor, call: int) -> Tensor:
        came = self.operands.came(call, self.rank)
        return kept[:came] if what in ("rows", "weights") else kept
