"""Which tiles of a Hopper kernel are split along K, and into how many parts. No torch.

CTAs draw work tiles from a list (`hopper.scheduler`); a work tile is a tile or a part of one. P of
them run at a time, P the number of SMs. The tiles of the last, incomplete wave are split where that
makes it short enough.
"""

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Tile

K_TILES_MIN = 8  # of a part, or a chunk: the time that it takes to fetch or store one
PART_K_TILES = 16  # what a part costs besides its k-tiles; two rounds of 1024 x 10240 x 8192 win
# Three rounds of parts took 2 to 15 % longer than one of whole tiles (AG+GEMM 4096 x 36864 x 12288
# and 512 x 57344 x 8192, 4 x H200, 2026-11-21, torch 2.11, triton 3.6); GEMM+RS 2304 x 5120 x 13824
# 524 us, whole tiles 497 (2 x H200, 2026-11-27, h200x2/trees.jsonl).
ROUNDS_MAX = 2
# Of tiles of 64 rows, whose k-tiles are shorter: 80 of 64 x 128, cut into thirds, took 39 us, whole
# ones 30 (128 x 5120 x 8192, H200, 2026-11-23, h200/split_k.jsonl).
LOW_PART_K_TILES = 24
PARTS_MAX = 4  # of a tile: each more costs 128 KiB written and read


class SplitK(NamedTuple):
    """The tiles of the last wave are split into `parts` parts each."""

    tiles: int
    sms: int
    parts: int = 1

    @property
    def split_tiles(self) -> int:
        return self.tiles % self.sms if self.parts > 1 else 0

    @property
    def first_part(self) -> int:
        """The first work tile that is a part: so many are whole tiles."""
        return self.tiles - self.split_tiles

    @property
    def work_tiles(self) -> int:
        """How long the list is."""
        return self.first_part + self.split_tiles * self.parts

    @property
    def ctas(self) -> int:
        return min(self.sms, self.work_tiles)

    @property
    def partials(self) -> int:
        """Tiles of partial sums: a place for every part but the first of every split tile."""
        return self.split_tiles * (self.parts - 1)

    def waves(self, k_tiles: int, part_k_tiles: int) -> float:
        """How long the last CTA works, in tiles of `k_tiles` k-tiles; a part costs some more."""
        whole, rest = divmod(self.tiles, self.sms)
        if self.parts == 1:
            return whole + (rest > 0)
        rounds = cdiv(rest * self.parts, self.sms)  # of parts, one an SM at a time
        return whole + rounds * (1 / self.parts + part_k_tiles / k_tiles)

    def numbers(self, k_tiles: int) -> tuple[int, ...]:
        """What `WorkTiles` is made of: the length of the list, where its parts begin, how many a
        tile has, and where parts 1, 2, ... of `k_tiles` k-tiles begin, for PARTS_MAX of them.
        """
        parts = self.parts
        cuts = [k_tiles * min(i, parts) // parts for i in range(1, PARTS_MAX)]
        return self.work_tiles, self.first_part, parts, *cuts


def chunk_count(world_size: int, k_tiles: int) -> int:
    """Of a local tile of GEMM+RS with so many k-tiles: one for each other rank, whose tile is
    fetched meanwhile, but each long enough for that.
    """
    return max(1, min(world_size - 1, k_tiles // K_TILES_MIN))


def is_ragged(M_shard: int, world_size: int, tile: Tile) -> bool:
    """Whether the last tiles of a gathered shard begin in the tiles before; at the end of a matrix
    TMA clips them.
    """
    return world_size > 1 and M_shard % tile.block_m > 0


def split_last_wave(tiles: int, k_tiles: int, sms: int, tile: Tile) -> SplitK:
    """The shortest, with as few parts as do."""
    shortest, rest = SplitK(tiles, sms), tiles % sms
    if not rest:
        return shortest
    part_k_tiles = LOW_PART_K_TILES if tile.block_m < 128 else PART_K_TILES
    least = shortest.waves(k_tiles, part_k_tiles)
    for parts in range(2, min(PARTS_MAX, k_tiles // K_TILES_MIN, ROUNDS_MAX * sms // rest) + 1):
        split = SplitK(tiles, sms, parts)
        if (waves := split.waves(k_tiles, part_k_tiles)) < least:
            shortest, least = split, waves
    return shortest
