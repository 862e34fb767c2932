"""Split-K on the device: which part of which tile a work tile is, partial sums and their fix-up.

`hopper.split_tiles` chooses what is split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Number, Parts, Pointer, aggregate, barrier
from flux_megatron.kernels.hopper import split_tiles as split_k
from flux_megatron.kernels.hopper.ring import mma_layout
from flux_megatron.kernels.hopper_primitives import count_release_gpu, uniform, wait_acquire_gpu

PARTS_MAX = gl.constexpr(split_k.PARTS_MAX)


@aggregate
class WorkTile:
    """A tile, or part `part` of the `parts` of one: k-tiles `first` to `last`. Part 0 has k-tile 0.
    `split` is the tile's number among all that are split.
    """

    tile: Number
    first: Number
    last: Number
    part: Number
    parts: Number
    split: Number

    @gluon.jit
    def behind(self, k_tiles):
        """It without its first k-tiles."""
        return WorkTile(
            self.tile, self.first + k_tiles, self.last, self.part, self.parts, self.split
        )


@aggregate
class WorkTiles:
    """The list of `count` work tiles, for `ctas` CTAs.

    Work tiles from `first_part` on are parts: `parts` of each tile, so that the last wave is short;
    `cuts` are the k-tiles where parts 1, 2 and 3 begin (`hopper.split_tiles.SplitK`).

    Parts of a tile are neighbours and part 0, which adds the others, is the last of them: it waits
    only for work tiles that have been drawn before it.
    """

    count: Number
    ctas: Number
    first_part: Number
    parts: Number
    cuts: Parts
    SPLITS: gl.constexpr

    @gluon.jit
    def locate(self, place, k_tiles):
        """The work tile at a place of the list; a tile has `k_tiles` k-tiles."""
        tile = place
        first = 0
        last = k_tiles
        part = 0
        parts = 1
        split = 0
        if self.SPLITS:
            behind = place - self.first_part
            if behind >= 0:
                split = uniform(behind // self.parts)
                part = self.parts - 1 - (behind - split * self.parts)
                parts = self.parts
                tile = self.first_part + split
                # By comparison: by a division the loop over these k-tiles would stay in vector
                # registers, which makes the GEMM 10 % slower (4 x H200, 2026-11-21, triton 3.6).
                last = self.cuts[0]
                for i in gl.static_range(1, PARTS_MAX):
                    if part == i:
                        first = self.cuts[i - 1]
                        last = k_tiles
                        if i < PARTS_MAX - 1:
                            last = self.cuts[i]
        return WorkTile(tile, first, last, part, parts, split)


@gluon.jit
def whole_tiles(count, ctas):
    """The list without parts."""
    return WorkTiles(count, ctas, count, 1, (0, 0, 0), False)


@aggregate
class Partials:
    """Sums over parts of K: [split tile, part 1 .. parts - 1, GROUPS, rows, BLOCK_N], and for each
    split tile and partition that multiplies the count of those that are there.
    """

    sums: Pointer
    counters: Pointer
    BLOCK_N: gl.constexpr
    NUM_WARPS: gl.constexpr
    GROUP: gl.constexpr
    GROUPS: gl.constexpr

    @gluon.jit
    def of_group(self, group: gl.constexpr):
        """Those of one of the partitions that multiply."""
        return Partials(self.sums, self.counters, self.BLOCK_N, self.NUM_WARPS, group, self.GROUPS)

    @gluon.jit
    def store(self, outs, work):
        """Leave the sum over a part of K, other than the first, to the CTA that has the first."""
        place = self._place(work, work.part - 1)
        for part in gl.static_range(len(outs)):
            gl.store(self._places(outs[part], place, part * outs[0].shape[1]), outs[part])
        barrier()
        count_release_gpu(self.counters + self._counter(work))  # flag [F]

    @gluon.jit
    def fix_up(self, outs, work, deadline, status):
        """Add the other parts of K, in their order, when they are there.

        This ends, because what it waits for comes earlier in the list; the deadline is for the case
        that another CTA has died.
        """
        counter = self._counter(work)
        wait_acquire_gpu(self.counters, counter, work.parts - 1, deadline, status)  # wait [F]
        gl.store(self.counters + counter, 0)  # for the next launch
        for part in range(work.parts - 1):
            place = self._place(work, part)
            outs = self._added(outs, place)
        return outs

    @gluon.jit
    def _counter(self, work):
        return work.split * self.GROUPS + self.GROUP

    @gluon.jit
    def _place(self, work, part):
        """Where the sums of part 1 + `part` are, counted in such."""
        before = work.split * (work.parts - 1) + part
        return (before * self.GROUPS + self.GROUP).to(gl.int64)

    @gluon.jit
    def _added(self, outs, place):
        """The sums + those at `place`."""
        added = (outs[0] + gl.load(self._places(outs[0], place, 0)),)
        for part in gl.static_range(1, len(outs)):
            pointers = self._places(outs[part], place, part * outs[0].shape[1])
            added = added + (outs[part] + gl.load(pointers),)
        return added

    @gluon.jit
    def _places(self, out, place, col: gl.constexpr):
        """Where the part of a tile's columns from `col` on lies: one part after another."""
        ROWS: gl.constexpr = out.shape[0]
        COLUMNS: gl.constexpr = out.shape[1]
        LAYOUT: gl.constexpr = mma_layout(COLUMNS, self.NUM_WARPS)
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        offsets = rows[:, None] * COLUMNS + cols[None, :]
        first: gl.constexpr = ROWS * col
        return self.sums + place * (ROWS * self.BLOCK_N) + first + offsets
