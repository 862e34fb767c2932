"""What one call of Embedding + All-to-All is, and what can be wrong with it on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flux_megatron.overlap.operands import described

MODES = ("sum", "mean")


@dataclass(frozen=True)
class Bags:
    """The sizes of a call: `tables[r]` are those of rank r, each with `rows` of D; `batch` samples
    on all ranks together. Bag t * batch + b of a rank is that of its table t and sample b.
    """

    tables: tuple[int, ...]
    rank: int
    rows: int
    D: int
    batch: int
    mode: str
    dtype: torch.dtype

    @staticmethod
    def of(weight: Tensor, offsets: Tensor, tables: Sequence[int], rank: int, mode: str) -> Bags:
        local, rows, D = weight.shape
        batch = (offsets.numel() - 1) // local
        return Bags(tuple(tables), rank, rows, D, batch, mode, weight.dtype)

    @property
    def world_size(self) -> int:
        return len(self.tables)

    @property
    def samples(self) -> int:
        """Of the batch, on each rank."""
        return self.batch // self.world_size

    @property
    def local(self) -> int:
        """Tables of this rank."""
        return self.tables[self.rank]

    @cached_property
    def first_tables(self) -> tuple[int, ...]:
        """The number of each rank's first table in the result, and at the end that of all."""
        return tuple(sum(self.tables[:r]) for r in range(self.world_size + 1))

    def columns(self, rank: int) -> slice:
        """The tables of a rank in the result."""
        return slice(self.first_tables[rank], self.first_tables[rank + 1])

    def __str__(self) -> str:
        """All that must be equal on all ranks."""
        return (
            f"embedding_a2a of tables {list(self.tables)} D={self.D} batch={self.batch} "
            f"{self.mode} {str(self.dtype).removeprefix('torch.')}"
        )


def shape_error(
    weight: Tensor, indices: Tensor, offsets: Tensor, tables: Sequence[int], rank: int,
    world_size: int, mode: str,
) -> str:  # fmt: skip
    """What is wrong with shapes, types and devices, as given and expected; or nothing."""
    if len(tables) != world_size:
        return f"tables {list(tables)} given, one number for each of {world_size} ranks expected"
    if mode not in MODES:
        return f"mode {mode!r} given, one of {MODES} expected"
    if weight.dim() != 3 or 0 in weight.shape or not weight.dtype.is_floating_point:
        return f"weight {described(weight)} given, floating-point [tables, rows, D] expected"
    if weight.shape[0] != tables[rank] or min(tables) < 1:
        return (
            f"weight {described(weight)} given, {list(tables)} tables a rank expected, at least one"
        )
    for name, given in (("indices", indices), ("offsets", offsets)):
        if given.dim() != 1 or given.dtype != torch.int64 or given.device != weight.device:
            return f"{name} {described(given)} given, int64 [n] on {weight.device} expected"
    bags = offsets.numel() - 1
    if bags < 1 or bags % (weight.shape[0] * world_size):
        return (
            f"offsets {described(offsets)} given, 1 + a multiple of {weight.shape[0]} tables x "
            f"{world_size} ranks expected"
        )
    if not (weight.is_contiguous() and indices.is_contiguous() and offsets.is_contiguous()):
        return "strides given, contiguous weight, indices and offsets expected"
    return ""


def data_error(indices: Tensor, offsets: Tensor, rows: int) -> str:
    """What is wrong with the numbers themselves, or nothing. The host waits for the device."""
    wrong = outside(indices, rows)
    falling = (offsets.diff() < 0).sum()
    ends = torch.stack((wrong.sum(), falling, offsets[0], offsets[-1])).tolist()
    if ends[2] != 0 or ends[3] != indices.numel():
        return f"offsets from {ends[2]} to {ends[3]} given, 0 to {indices.numel()} expected"
    if ends[1]:
        place = int((offsets.diff() < 0).nonzero()[0])
        return (
            f"offsets {offsets[place].item()}, {offsets[place + 1].item()} given at {place}, "
            "rising ones expected"
        )
    if ends[0]:
        place = int(wrong.nonzero()[0])
        return f"index {indices[place].item()} given at {place}, 0 to {rows - 1} expected"
    return ""


def outside(indices: Tensor, rows: int) -> Tensor:
    """Whether each index lies outside its table."""
    return (indices < 0) | (indices >= rows)


def bags_of_entries(indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Each bag's number of entries, and the number of each entry's bag, [nnz]; the host does not
    wait for it.
    """
    lengths = offsets.diff()
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    return lengths, torch.repeat_interleave(numbers, lengths, output_size=indices.numel())
