"""A call of experts, as all of its kernels' functions on the host take it, and the exchange of
counts with which it begins (`experts.routes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels.experts.routes import FIELDS, WORDS, exchange_counts_kernel
from flux_megatron.kernels.hopper.config import Config, common_config
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm import signals
from flux_megatron.symm.channel import Call

COPY_COLUMNS = 512


def header_bytes(world_size: int, experts: int) -> int:
    """Bytes before the rows in a region: from every rank its counts and how many rows it has."""
    return cdiv(world_size * (world_size * experts + 1) * 4, 256) * 256


def experts_per_signal(experts: int) -> int:
    """Slot 0 of a rank announces its counts, the others its rows."""
    return cdiv(experts, signals.MAX_COMM_TILES - 1)


class ExpertCall(NamedTuple):
    """Each rank has `experts` experts. No rank receives more than `capacity` rows. GEMM tiles are
    `tile`, pushes and copies have `comm_rows` rows.
    """

    call: Call
    experts: int
    capacity: int
    layout: str
    tile: Tile
    comm_rows: int

    @property
    def groups(self) -> int:
        return self.call.region.world_size * self.experts

    def constants(self, columns: int) -> dict[str, int]:
        """The constexprs of the portable kernels, which copy rows of so many columns."""
        world_size = self.call.region.world_size
        return {
            "WORLD_SIZE": world_size, "EXPERTS": self.experts,
            "PER_SIGNAL": experts_per_signal(self.experts),
            "HEADER": header_bytes(world_size, self.experts), "ROWS": self.comm_rows,
            "COLUMNS": min(COPY_COLUMNS, next_power_of_2(columns)),
            "BLOCK_G": next_power_of_2(self.groups), "LAYOUT_NN": self.layout == "nn",
        }  # fmt: skip

    def most_tiles(self, N: int) -> int:
        """That a rank may have to make of its rows, each group of which may end with a part."""
        rows_of_tiles = cdiv(self.capacity, self.tile.block_m) + self.groups
        return rows_of_tiles * cdiv(N, self.tile.block_n)

    def received(self, like: Tensor, columns: int) -> Tensor:
        """The rows [capacity, columns] of this rank's region."""
        region, shape = self.call.region, (self.capacity, columns)
        header = header_bytes(region.world_size, self.experts)
        return region.view(region.rank, shape, like.dtype, header)


def exchange_counts(counts: Tensor, about: ExpertCall, *, rows: int) -> tuple[Tensor, Tensor]:
    """The routes of a call, and what this rank receives: int32 [R, E], by source and expert.

    `rows` is what `counts` [R, E] must add up to.
    """
    world_size, experts = counts.shape
    arrivals = world_size * cdiv(experts, experts_per_signal(experts))
    routes = counts.new_empty(FIELDS.value * about.groups + WORDS.value + arrivals)
    received = torch.empty_like(counts)
    launch_kernel(
        exchange_counts_kernel, (1,), Tile(about.tile.block_m, num_warps=4, num_stages=1),
        (counts, routes, received, *about.call.tensors),
        (*about.call.numbers, rows, about.capacity),
        BLOCK_R=next_power_of_2(world_size), BLOCK_E=next_power_of_2(experts), ARRIVALS=arrivals,
        **about.constants(1),
    )  # fmt: skip
    return routes, received


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(Config):
    """What the Hopper kernels of experts are compiled for."""

    EXPERTS: int
    PER_SIGNAL: int
    BLOCK_G: int
    HEADER: int
    ROWS: int
    KEEP: bool


def expert_config(about: ExpertCall, keep: bool = False) -> ExpertConfig:
    """With `keep` rows are kept for backward."""
    known = about.constants(1)
    return ExpertConfig(
        **common_config(about.call.region.world_size, about.layout, about.tile), KEEP=keep,
        **{name: known[name] for name in ("EXPERTS", "PER_SIGNAL", "BLOCK_G", "HEADER", "ROWS")},
    )  # fmt: skip
