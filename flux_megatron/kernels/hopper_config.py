"""What the Hopper kernels are compiled for: their tile, and the constants that they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flux_megatron.kernels import launch
from flux_megatron.kernels.split_k import SplitK
from flux_megatron.problem import Tile

TILE = Tile(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3, tma=True)
NARROW = replace(TILE, block_n=128, num_stages=5, group_m=16)
# Of AG+GEMM and GEMMs alone: they fill waves where those two do not. Tiles of 64 rows have one
# warp group, and more stages in the memory that they leave.
MEDIUM = replace(TILE, block_n=192, num_stages=4, group_m=16)
SLIM = replace(TILE, block_n=160, num_stages=5, group_m=16)
_LOW = replace(TILE, block_m=64, num_warps=4, group_m=16)
LOW = tuple(
    replace(_LOW, block_n=columns, num_stages=stages)
    for columns, stages in ((192, 6), (160, 7), (128, 8), (64, 12))
)
TILES = (replace(TILE, group_m=16), MEDIUM, SLIM, NARROW, *LOW)


def column_parts(block_n: int) -> tuple[int, int | None]:
    """A tile's columns as the powers of two that the language wants: 192 are 128 and 64."""
    first = 1 << block_n.bit_length() - 1
    return first, block_n - first or None


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a kernel is compiled for, as one constexpr; each kernel adds what is its own."""

    WORLD_SIZE: int
    GROUP_M: int
    EARLY_PARTS: int
    LAST_PARTS: int
    STAGES: int
    NUM_WARPS: int
    NUM_CTAS: int
    LAYOUT_NN: bool

    @property
    def PARTS_MAX(self) -> int:
        return max(self.EARLY_PARTS, self.LAST_PARTS)


def common_config(world_size: int, layout: str, tile: Tile, split: SplitK) -> dict[str, int]:
    """The fields of `Config`."""
    return {
        "WORLD_SIZE": world_size, "GROUP_M": tile.group_m, "EARLY_PARTS": split.early_parts,
        "LAST_PARTS": split.last_parts, "STAGES": tile.num_stages, "NUM_WARPS": tile.num_warps,
        "NUM_CTAS": split.ctas, "LAYOUT_NN": layout == "nn",
    }  # fmt: skip


def sms(device: torch.device) -> int:
    """CTAs that run at once: one an SM."""
    (ctas,) = launch.persistent_grid(device, 1 << 30)
    return ctas
