"""In which order experts' rows are multiplied and travel, worked out from the counts of all ranks.

A band is a stretch of groups in the order (expert, step): what this rank has for some of its
experts from the ranks rank + 1, rank + 2, ... What a rank has in a band from, or for, another rank
is one piece, so an all-to-all of pieces needs no permutation:

| rows | sorted by | piece of a band |
| --- | --- | --- |
| far: of other ranks | (source, expert) | some experts of one source |
| tokens: as this rank sends them | (owner, expert) | some experts of one owner |

All ranks cut alike, because all know all counts, and make the same all-to-alls in the same order: a
band without rows on one rank is empty there, one without rows on all ranks is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels.experts.signalled import AWAY, BAND, EXPERT, FIRST, HOME, ROWS
from flux_megatron.problem import MAX_GROUPS

Pieces = list[tuple[int, int]]  # for each rank the first and the last row + 1; empty for itself


class Band(NamedTuple):
    """Its rows of tiles on this rank, and what each rank's pieces of it are."""

    first: int
    tile_rows: int
    far: Pieces
    tokens: Pieces


class Order(NamedTuple):
    """`table` is the kernel's. Behind the bands' rows of tiles come those of this rank's groups."""

    table: Tensor
    far_groups: int
    bands: list[Band]
    near_first: int
    near_tile_rows: int


# a layer's forward and backward have the same counts four times
@lru_cache(maxsize=256)
def order_of(
    counts: tuple[int, ...], ranks: int, rank: int, bands: int, block_m: int, device: torch.device
) -> Order:
    """The order on `rank`, in at most `bands` bands, by the counts [R sources, R owners, E]."""
    every = torch.tensor(counts).view(ranks, ranks, -1)
    experts, came, sent = every.shape[2], every[:, rank], every[rank]
    steps = [(rank + step) % ranks for step in range(1, ranks)]
    far, tokens = _firsts(came), _firsts(sent)
    home = _firsts(came.t()).view(experts, ranks).t()
    rows = _by_expert(came[steps], came[rank])
    tiles = (rows + block_m - 1).div(block_m, rounding_mode="floor")
    ends = tiles.cumsum(0)
    own, (numbers, stretches) = torch.arange(experts), _cut(every, min(max(bands, 1), MAX_GROUPS))
    fields = {
        FIRST: ends - tiles,
        ROWS: rows,
        EXPERT: _by_expert(own.expand(ranks - 1, experts), own),
        BAND: torch.cat([numbers, own * 0]),
        HOME: _by_expert(home[steps], home[rank]),
        AWAY: _by_expert(far.view(ranks, experts)[steps], tokens.view(ranks, experts)[rank]),
    }
    table = torch.stack([fields[name] for name in sorted(fields, key=lambda name: name.value)])

    edges = ([*far.tolist(), int(came.sum())], [*tokens.tolist(), int(sent.sum())])
    made, first, of_tiles = [], 0, [0, *ends.tolist()]
    for groups in stretches:
        end = of_tiles[groups.stop]
        made.append(Band(first, end - first, *_pieces(groups, edges, ranks, rank)))
        first = end
    on_device = table.to(torch.int32).to(device)
    return Order(on_device, len(numbers), made, first, of_tiles[-1] - first)


def _cut(every: Tensor, bands: int) -> tuple[Tensor, list[range]]:
    """The number of each far group's band, in order, and each band's groups: all ranks together
    have about as many rows in each band, and rows in each.
    """
    ranks = len(every)
    owners = torch.arange(ranks)
    sources = (owners + torch.arange(1, ranks)[:, None]) % ranks
    rows = every[sources, owners].sum(1).t().flatten()  # by (expert, step)
    middles = 2 * rows.cumsum(0) - rows
    wanted = (middles * bands).div(max(2 * int(rows.sum()), 1), rounding_mode="floor")
    used = wanted[rows > 0].unique()
    # what has no rows anywhere goes with the band before, or the first
    numbers = (torch.searchsorted(used, wanted, right=True) - 1).clamp(min=0)
    ends = torch.searchsorted(numbers, torch.arange(len(used)), right=True).tolist()
    return numbers, [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _by_expert(steps: Tensor, own: Tensor) -> Tensor:
    """Far groups of [R - 1, E] in the order (expert, step), then the rank's own."""
    return torch.cat([steps.t().flatten(), own])


def _firsts(rows: Tensor) -> Tensor:
    """Where each of these groups begins if they lie one after another."""
    flat = rows.flatten()
    return flat.cumsum(0) - flat


def _pieces(
    groups: range, edges: tuple[list[int], list[int]], ranks: int, rank: int
) -> tuple[Pieces, Pieces]:
    """What this rank has of each source, and for each owner; `edges` say where groups begin there,
    by (rank, expert).
    """
    experts = len(edges[0]) // ranks
    found: tuple[Pieces, Pieces] = [(0, 0)] * ranks, [(0, 0)] * ranks
    for step in range(1, ranks):
        first, last = (-(-(g - step + 1) // (ranks - 1)) for g in (groups.start, groups.stop))
        for pieces, rows, other in zip(
            found, edges, ((rank + step) % ranks, (rank - step) % ranks), strict=True
        ):
            pieces[other] = rows[other * experts + first], rows[other * experts + last]
    return found
