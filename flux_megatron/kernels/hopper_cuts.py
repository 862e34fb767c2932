"""Which tiles of a Hopper kernel are cut along K, and into how many parts. No torch.

CTAs draw items from a list (`hopper_scheduler`); an item is a tile or a part of one. The choice
assumes that P of them run at a time, P the number of SMs. Two kinds of tiles are cut, each where it
shortens the call:

- early ones. AG+GEMM: all tiles of the first shards, where the own shard has fewer than P, so that
  every program multiplies own rows while the next arrive. GEMM+RS: the last tiles of other shards,
  those that fill no wave, so that they travel while own tiles are made.
- those of the last, incomplete wave, so that it is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.symm.signals import PARTIAL_COUNTERS

STEPS_MIN = 8  # of K in a part: the time that it takes to fetch or store one
# What a part costs besides its steps: with 8 three rounds of parts would win where they took 2 to
# 15 % longer than one of whole tiles (AG+GEMM 4096 x 36864 x 12288 and 512 x 57344 x 8192, 4 x
# H200, 2026-11-21, torch 2.11, triton 3.6), with 16 two rounds still win (1024 x 10240 x 8192).
PART_STEPS = 16
PARTS_MAX = 8  # of an early tile
SPLIT_MAX = 4  # parts of a tile of the last wave: each more costs 128 KiB written and read


@dataclass(frozen=True)
class Cuts:
    """The `early` tiles before tile `early_last` in `parts` parts each; of the last wave in
    `split`.
    """

    tiles: int
    processors: int
    early_last: int = 0
    early: int = 0
    parts: int = 1
    split: int = 1

    @property
    def rest(self) -> int:
        """Tiles of the last wave, if it is cut."""
        if self.split == 1:
            return 0
        items = self.tiles + self.early * (self.parts - 1)
        return min(items % self.processors, self.tiles - self.early_last)

    @property
    def works(self) -> int:
        """Items of the list."""
        return self.tiles + self.early * (self.parts - 1) + self.rest * (self.split - 1)

    @property
    def whole(self) -> int:
        """Items before the first part: whole tiles."""
        return self.early_last - self.early if self.early else self.split_first

    @property
    def split_first(self) -> int:
        """The first item of the last wave's parts."""
        return self.works - self.rest * self.split

    @property
    def programs(self) -> int:
        return min(self.processors, self.works)

    @property
    def partials(self) -> int:
        """Tiles of partial sums: a place for every part but the first of every tile that is cut."""
        cut = self.rest + (self.early if self.parts > 1 else 0)
        return cut * (max(self.parts, self.split) - 1)

    def waves(self, steps: int) -> float:
        """How long the last program works, in tiles of `steps` steps; a part costs some more."""
        busy = [0.0] * self.programs
        for work, parts in enumerate(self._parts()):
            busy[work % self.programs] += 1 / parts + (PART_STEPS / steps if parts > 1 else 0)
        return max(busy)

    def _parts(self) -> Iterator[int]:
        """Of the tile of each item."""
        before = self.early_last - self.early
        yield from [1] * before
        yield from [self.parts] * (self.early * self.parts)
        yield from [1] * (self.tiles - self.rest - before - self.early)
        yield from [self.split] * (self.rest * self.split)


def cuts_of_gather(own: int, world_size: int, shards: int, steps: int, processors: int) -> Cuts:
    """For AG+GEMM with `own` tiles a shard, `shards` of them cut; with none, or where the own
    tiles keep all programs busy, only the last wave is.
    """
    early = min(shards, world_size) * own
    parts = min(cdiv(processors * 19 // 20, own), steps // STEPS_MIN, PARTS_MAX)  # nearly all
    if not early or parts < 2 or early + processors > PARTIAL_COUNTERS:
        early, parts = 0, 1
    return _best([(early, early, parts)], own * world_size, steps, processors)


def cuts_of_scatter(own: int, world_size: int, shards: int, steps: int, processors: int) -> Cuts:
    """For GEMM+RS with `own` tiles a shard; with `shards` of 1 the last tiles of other shards are
    cut, if they fill at most half a wave.
    """
    others = own * (world_size - 1)
    early = others % processors
    choices = [(0, 0, 1)]
    if shards and 0 < early <= processors // 2:
        most = min(processors // early, steps // STEPS_MIN, SPLIT_MAX)
        choices = [(others, early, parts) for parts in range(2, most + 1)] or choices
    return _best(choices, own * world_size, steps, processors)


def _best(choices: list[tuple[int, int, int]], tiles: int, steps: int, processors: int) -> Cuts:
    """The shortest, with as few parts as do."""
    most = max(1, min(SPLIT_MAX, steps // STEPS_MIN))
    cuts = [
        Cuts(tiles, processors, *choice, split)
        for choice in choices
        for split in range(1, most + 1)
    ]
    best = min(cuts, key=lambda one: (one.waves(steps), one.partials))
    # Code for both kinds of cuts, or none: with only one of them the assembler keeps the loop over
    # K in vector registers, which costs 10 % (Triton 3.6 and 3.7).
    return replace(best, parts=max(best.parts, 2)) if best.split > 1 else best
