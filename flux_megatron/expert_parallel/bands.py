"""In which order experts' rows are multiplied and travel, worked out from the counts of all ranks.

A band is a stretch of groups in the order (expert, step): what this rank has for some of its
experts from the ranks rank + 1, rank + 2, ... A rank has its part of a band from, or for, each other
rank as one piece, so an all-to-all of pieces needs no permutation:

| rows | sorted by | piece of a band |
| --- | --- | --- |
| far: of other ranks | (source, expert) | some experts of one source |
| tokens: as this rank sends them | (owner, expert) | some experts of one owner |

All ranks cut alike, because all know all counts, and make the same all-to-alls in the same order: a
band without rows on one rank is empty there, one without rows on all ranks is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels.signalled_experts import AWAY, BAND, EXPERT, FIELDS, FIRST, HOME, ROWS
from flux_megatron.problem import MAX_GROUPS

Pieces = list[tuple[int, int]]  # for each rank the first and the last row + 1; empty for itself


class Band(NamedTuple):
    """Its rows of tiles on this rank, and what each rank's pieces of it are."""

    first: int
    tile_rows: int
    far: Pieces
    tokens: Pieces


class Order(NamedTuple):
    """`table` is the kernel's, on the host. Behind the bands' rows of tiles come `near` of them."""

    table: Tensor
    far_groups: int
    bands: list[Band]
    near_first: int
    near_tile_rows: int


def order_of(every: Tensor, rank: int, bands: int, block_m: int) -> Order:
    """The order on `rank`, in at most `bands` bands, by the counts [R sources, R owners, E]."""
    every = every.long()
    ranks, _, experts = every.shape
    came, sent = every[:, rank], every[rank]
    numbers, used = _cut(every, min(max(bands, 1), MAX_GROUPS))
    steps = [(rank + step) % ranks for step in range(1, ranks)]
    rows = _by_expert(came[steps], came[rank])
    ends = ((rows + block_m - 1) // block_m).cumsum(0)
    far_groups = experts * (ranks - 1)

    table = torch.zeros(FIELDS, len(rows), dtype=torch.int64)
    table[FIRST.value, 1:] = ends[:-1]
    table[ROWS.value] = rows
    of_expert = torch.arange(experts).expand(ranks - 1, experts)
    table[EXPERT.value] = _by_expert(of_expert, torch.arange(experts))
    table[BAND.value, :far_groups] = torch.searchsorted(used, numbers)
    home = _firsts(came.t()).view(experts, ranks).t()
    table[HOME.value] = _by_expert(home[steps], home[rank])
    far, tokens = _firsts(came), _firsts(sent)
    by_source, mine = far.view(ranks, experts), tokens.view(ranks, experts)[rank]
    table[AWAY.value] = _by_expert(by_source[steps], mine)

    first, made = 0, []
    edges = [0, *ends.tolist()]
    for number in used.tolist():
        end = edges[int((numbers <= number).sum())]
        experts_of = _experts_of(numbers.view(experts, ranks - 1), number)
        made.append(
            Band(first, end - first, _pieces(came, far, experts_of, rank, 1),
                 _pieces(sent, tokens, experts_of, rank, -1))
        )  # fmt: skip
        first = end
    last = edges[-1]
    return Order(table.to(torch.int32), far_groups, made, first, last - first)


def _cut(every: Tensor, bands: int) -> tuple[Tensor, Tensor]:
    """The number of each far group's band, in order, and the numbers in use: so that all ranks
    together have about as many rows in each band.
    """
    ranks, _, experts = every.shape
    owners = torch.arange(ranks)
    sources = (owners + torch.arange(1, ranks)[:, None]) % ranks
    rows = every[sources, owners].sum(1).t().flatten()  # by (expert, step)
    total = int(rows.sum())
    middles = 2 * rows.cumsum(0) - rows
    numbers = (middles * bands).div(max(2 * total, 1), rounding_mode="floor").clamp(max=bands - 1)
    return numbers, numbers[rows > 0].unique()


def _by_expert(steps: Tensor, own: Tensor) -> Tensor:
    """Far groups of [R - 1, E] in the order (expert, step), then the rank's own."""
    return torch.cat([steps.t().flatten(), own])


def _firsts(rows: Tensor) -> Tensor:
    """Where each of these groups begins if they lie one after another."""
    flat = rows.flatten()
    return flat.cumsum(0) - flat


def _experts_of(numbers: Tensor, number: int) -> list[list[int]]:
    """For each step the first and the last expert + 1 in a band; `numbers` [E, R - 1]."""
    return torch.stack([(numbers < number).sum(0), (numbers <= number).sum(0)], 1).tolist()


def _pieces(
    rows: Tensor, firsts: Tensor, experts_of: list[list[int]], rank: int, sign: int
) -> Pieces:
    """The stretch of each rank; `rows` [R, E] lie one after another, beginning at `firsts`."""
    ranks, experts = rows.shape
    edges = [*firsts.tolist(), int(rows.sum())]
    pieces = [(0, 0)] * ranks
    for step, (first, last) in enumerate(experts_of, 1):
        other = (rank + sign * step) % ranks
        pieces[other] = edges[other * experts + first], edges[other * experts + last]
    return pieces
