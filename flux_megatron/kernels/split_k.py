"""Which tiles of a Hopper kernel are split along K, and into how many parts. No torch.

CTAs draw work tiles from a list (`hopper_scheduler`); a work tile is a tile or a part of one. The
choice assumes that P of them run at a time, P the number of SMs. Two kinds of tiles are split, each
where it shortens the call:

- early ones. AG+GEMM: all tiles of the first shards, where the local shard has fewer than P, so
  that every CTA multiplies local rows while the next arrive. GEMM+RS: the last tiles of remote
  shards, those that fill no wave, so that they travel while local tiles are made.
- those of the last, incomplete wave, so that it is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Tile
from flux_megatron.symm.signals import SPLIT_TILES

K_TILES_MIN = 8  # of a part, or a chunk: the time that it takes to fetch or store one
# What a part costs besides its k-tiles: with 8 three rounds of parts would win where they took 2 to
# 15 % longer than one of whole tiles (AG+GEMM 4096 x 36864 x 12288 and 512 x 57344 x 8192, 4 x
# H200, 2026-11-21, torch 2.11, triton 3.6), with 16 two rounds still win (1024 x 10240 x 8192).
PART_K_TILES = 16
# Of tiles of 64 rows, whose k-tiles are shorter: 80 of 64 x 128, cut into thirds, took 39 us, whole
# ones 30 (128 x 5120 x 8192, H200, 2026-11-23, docs/results/h200/split_k.jsonl).
LOW_PART_K_TILES = 24
EARLY_PARTS_MAX = 8
LAST_PARTS_MAX = 4  # of a tile of the last wave: each more costs 128 KiB written and read


@dataclass(frozen=True)
class SplitK:
    """The `early` tiles before tile `early_last` are split into `early_parts` parts each, those of
    the last wave into `last_parts`.
    """

    tiles: int
    sms: int
    early_last: int = 0
    early: int = 0
    early_parts: int = 1
    last_parts: int = 1

    @property
    def last_wave(self) -> int:
        """Tiles of the last wave, if it is split."""
        if self.last_parts == 1:
            return 0
        work_tiles = self.tiles + self.early * (self.early_parts - 1)
        return min(work_tiles % self.sms, self.tiles - self.early_last)

    @property
    def work_tiles(self) -> int:
        """How long the list is."""
        more = self.early * (self.early_parts - 1) + self.last_wave * (self.last_parts - 1)
        return self.tiles + more

    @property
    def whole(self) -> int:
        """Work tiles before the first part: whole tiles."""
        return self.early_last - self.early if self.early else self.last_wave_first

    @property
    def last_wave_first(self) -> int:
        """The first work tile of the last wave's parts."""
        return self.work_tiles - self.last_wave * self.last_parts

    @property
    def ctas(self) -> int:
        return min(self.sms, self.work_tiles)

    @property
    def partials(self) -> int:
        """Tiles of partial sums: a place for every part but the first of every split tile."""
        split = self.last_wave + (self.early if self.early_parts > 1 else 0)
        return split * (max(self.early_parts, self.last_parts) - 1)

    def waves(self, k_tiles: int, part_k_tiles: int) -> float:
        """How long the last CTA works, in tiles of `k_tiles` k-tiles; a part costs some more."""
        busy = [0.0] * self.ctas
        for work, parts in enumerate(self._parts()):
            busy[work % self.ctas] += 1 / parts + (part_k_tiles / k_tiles if parts > 1 else 0)
        return max(busy)

    def _parts(self) -> Iterator[int]:
        """Of the tile of each work tile."""
        before = self.early_last - self.early
        yield from [1] * before
        yield from [self.early_parts] * (self.early * self.early_parts)
        yield from [1] * (self.tiles - self.last_wave - before - self.early)
        yield from [self.last_parts] * (self.last_wave * self.last_parts)


def chunk_count(world_size: int, k_tiles: int) -> int:
    """Of a local tile of GEMM+RS with so many k-tiles: one for each other rank, whose tile is
    fetched meanwhile, but each long enough for that.
    """
    return max(1, min(world_size - 1, k_tiles // K_TILES_MIN))


def is_low(tile: Tile) -> bool:
    return tile.block_m < 128


def is_ragged(M_shard: int, world_size: int, tile: Tile) -> bool:
    """Whether the last tiles of a gathered shard begin in the tiles before; at the end of a matrix
    TMA clips them.
    """
    return world_size > 1 and M_shard % tile.block_m > 0


def split_k_of_gather(
    shard_tiles: int, world_size: int, shards: int, k_tiles: int, sms: int, ragged: bool = False,
    low: bool = False,
) -> SplitK:  # fmt: skip
    """For AG+GEMM with `shard_tiles` tiles a shard, `shards` of them split; with none, or where the
    local tiles keep all SMs busy, only the last wave is. In `ragged` shards no tile is: two make
    the same rows, whose sums must have one order. Tiles are `low` with 64 rows.
    """
    if ragged:
        return SplitK(shard_tiles * world_size, sms)
    early = min(shards, world_size) * shard_tiles
    parts = min(
        cdiv(sms * 19 // 20, shard_tiles), k_tiles // K_TILES_MIN, EARLY_PARTS_MAX
    )  # nearly all SMs
    if not early or parts < 2 or early + sms > SPLIT_TILES:
        early, parts = 0, 1
    cost = LOW_PART_K_TILES if low else PART_K_TILES
    return _best([(early, early, parts)], shard_tiles * world_size, k_tiles, sms, cost)


def split_k_of_scatter(
    shard_tiles: int, world_size: int, shards: int, k_tiles: int, sms: int
) -> SplitK:
    """For GEMM+RS with `shard_tiles` tiles a shard; with `shards` of 1 the last tiles of remote
    shards are split, if they fill at most half a wave.
    """
    remote = shard_tiles * (world_size - 1)
    early = remote % sms
    choices = [(0, 0, 1)]
    if shards and 0 < early <= sms // 2:
        most = min(sms // early, k_tiles // K_TILES_MIN, LAST_PARTS_MAX)
        choices = [(remote, early, parts) for parts in range(2, most + 1)] or choices
    return _best(choices, shard_tiles * world_size, k_tiles, sms, PART_K_TILES)


def _best(
    choices: list[tuple[int, int, int]], tiles: int, k_tiles: int, sms: int, part_k_tiles: int
) -> SplitK:
    """The shortest, with as few parts as do."""
    most = max(1, min(LAST_PARTS_MAX, k_tiles // K_TILES_MIN))
    splits = [
        SplitK(tiles, sms, *choice, last_parts)
        for choice in choices
        for last_parts in range(1, most + 1)
    ]
    best = min(splits, key=lambda one: (one.waves(k_tiles, part_k_tiles), one.partials))
    # Code for both kinds, or none: with only one of them the assembler keeps the loop over K in
    # vector registers, which costs 10 % (Triton 3.6 and 3.7).
    return replace(best, early_parts=max(best.early_parts, 2)) if best.last_parts > 1 else best
