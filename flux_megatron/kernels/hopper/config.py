"""What the Hopper kernels are compiled for: their tile, and the constants that they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flux_megatron.kernels import launch
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling

GROUP_WARPS = 4  # of a warp group, which wgmma takes
SLICE_COLUMNS = 64  # of a slice in which a tile of AG+GEMM is stored: what TMA swizzles
ELEMENT_BYTES = 2
SHARED_BYTES = 227 << 10  # of a CTA, at most
BARRIERS_BYTES = 1 << 10  # of barriers, and of what Triton puts beside the partitions

TILE = Tile(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3, tma=True)
NARROW = replace(TILE, block_n=128, num_stages=6, group_m=16)
# Of AG+GEMM and GEMMs alone, whose tiles are stored in slices: the memory that this leaves is a
# stage more. Tiles of 64 rows have one warp group.
DEEP = replace(TILE, num_stages=4, group_m=16)
LONG = replace(TILE, group_m=16)
LONG_FLOPS, LONG_K = 4e11, 16384
_LOW = replace(TILE, block_m=64, num_warps=4, group_m=16)
LOW = tuple(
    replace(_LOW, block_n=columns, num_stages=stages) for columns, stages in ((128, 8), (64, 10))
)
TILES = (DEEP, NARROW, *LOW)
LEADS = {3: 1, 4: 3, 5: 4}  # by stages


def wide_tile(M: int, N: int, K: int) -> Tile:
    """Of 128 x 256, for x [M, K] times w of N columns. With a fourth stage GEMMs up to LONG_FLOPS
    take 0.9 % less time on average (69 shapes from M = 512 on), longer ones 0.2 % less up to
    M = 2048 (24), and 1.4 % more at M = 8192 (3; H200, 2026-11-23, gemm_slices.jsonl); but 4 to 6 %
    less there where K is 18432 or 24576 (3; 2026-11-24, gemm_groups.jsonl).
    """
    return LONG if 2 * M * N * K > LONG_FLOPS and K <= LONG_K else DEEP


def slice_buffers(tile: Tile, out_dtype: torch.dtype | None) -> int:
    """How many slices of a tile shared memory holds beside the stages. FP8 has an `out_dtype`."""
    operand_bytes, out_bytes = (1, out_dtype.itemsize) if out_dtype else (ELEMENT_BYTES,) * 2
    stages_bytes = tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * operand_bytes
    free = SHARED_BYTES - stages_bytes - BARRIERS_BYTES
    slice_bytes = tile.block_m * SLICE_COLUMNS * out_bytes
    return min(free // slice_bytes, tile.block_n // SLICE_COLUMNS)


def warp_groups(tile: Tile) -> int:
    """That multiply a tile, 64 rows each."""
    return tile.num_warps // GROUP_WARPS


def lead(tile: Tile) -> int:
    """By how many k-tiles the first of two warp groups ends a tile before the second. The more, the
    longer one multiplies while the other stores; but the more stages they hold, the later the next
    tile comes (decision 0006).
    """
    return LEADS.get(tile.num_stages, tile.num_stages // 2)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a kernel is compiled for, as one constexpr; each kernel adds what is its own."""

    WORLD_SIZE: int
    GROUP_M: int
    STAGES: int
    NUM_WARPS: int
    LAYOUT_NN: bool
    SCALED: bool  # FP8
    SPLIT_ACCUMULATOR: bool


def common_config(
    world_size: int, layout: str, tile: Tile, scaling: Scaling | None = None
) -> dict[str, int]:
    """The fields of `Config`."""
    return {
        "WORLD_SIZE": world_size, "GROUP_M": tile.group_m, "STAGES": tile.num_stages,
        "NUM_WARPS": tile.num_warps, "LAYOUT_NN": layout == "nn", "SCALED": scaling is not None,
        "SPLIT_ACCUMULATOR": scaling is not None and scaling.split_accumulator,
    }  # fmt: skip


def resident_ctas(device: torch.device) -> int:
    """CTAs that run at once: one an SM."""
    (ctas,) = launch.persistent_grid(device, 1 << 30)
    return ctas
