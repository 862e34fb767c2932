"""What the Hopper kernels of expert parallelism are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flux_megatron.kernels import hopper_config
from flux_megatron.kernels.expert_routes import experts_per_signal, header_bytes
from flux_megatron.kernels.hopper_config import Config, common_config
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.problem import Tile

TILE = replace(hopper_config.TILE, group_m=16)


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(Config):
    EXPERTS: int
    PER_SIGNAL: int
    BLOCK_G: int
    HEADER: int
    ROWS: int
    KEEP: bool


@lru_cache(maxsize=256)
def expert_config(
    world_size: int, experts: int, layout: str, tile: Tile, comm_rows: int,
    keep: bool = False,
) -> ExpertConfig:  # fmt: skip
    """Rows are pushed, cleared and copied by `comm_rows`, and with `keep` kept for backward."""
    return ExpertConfig(
        **common_config(world_size, layout, tile), EXPERTS=experts,
        PER_SIGNAL=experts_per_signal(experts), BLOCK_G=next_power_of_2(world_size * experts),
        HEADER=header_bytes(world_size, experts), ROWS=comm_rows, KEEP=keep,
    )  # fmt: skip


def most_tiles(config: ExpertConfig, capacity: int, N: int, tile: Tile) -> int:
    """That a rank may have to make of `capacity` rows, each group of which may end with a part."""
    groups = config.WORLD_SIZE * config.EXPERTS
    return (cdiv(capacity, tile.block_m) + groups) * cdiv(N, tile.block_n)
