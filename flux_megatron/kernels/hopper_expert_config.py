"""What the Hopper kernels of expert parallelism are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flux_megatron.kernels import hopper_config
from flux_megatron.kernels.expert_call import ExpertCall
from flux_megatron.kernels.hopper_config import Config, common_config

TILE = replace(hopper_config.TILE, group_m=16)


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(Config):
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
        **common_config(about.call.world_size, about.layout, about.tile), KEEP=keep,
        **{name: known[name] for name in ("EXPERTS", "PER_SIGNAL", "BLOCK_G", "HEADER", "ROWS")},
    )  # fmt: skip
