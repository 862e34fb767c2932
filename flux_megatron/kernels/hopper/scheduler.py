"""The tile scheduler of the Hopper kernels: CTAs draw work tiles from a list (`hopper.split_k`).

No work tile belongs to a CTA: the producer warp draws the next one from a work counter in device
memory while it loads the last k-tiles of the one before, and hands it to the other warps through
shared memory. So a CTA that gets no SM, because another kernel holds it, holds up nothing, and one
resident CTA makes all tiles.

What a work tile waits for, at other ranks or at [F], was drawn before it by a CTA that runs
(`docs/memory_model.md`, "Progress").
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flux_megatron.kernels.gluon_versions import Number, Pointer, Shared, aggregate, barrier
from flux_megatron.kernels.hopper.split_k import WorkTiles
from flux_megatron.kernels.hopper_primitives import begin_claim, begin_draw, end_draw, uniform
from flux_megatron.symm import signals

WORK_CLAIMS = gl.constexpr(signals.WORK_CLAIMS)
WORK_WORDS = gl.constexpr(signals.WORK_WORDS)


@aggregate
class TileScheduler:
    """The list, and the words from which CTAs draw: a counter, and a claim for each of the first
    `by_id` work tiles.
    """

    tiles: WorkTiles
    words: Pointer
    by_id: Number

    @gluon.jit
    def begin(self):
        """Claim a CTA's own number, if it is below `by_id`: `first` tells what came of it.
        Neighbours of SMs then begin with neighbours of tiles, which share operands: drawn at
        random, GEMM+RS 2048 x 12288 x 12288 took 0.8 % longer (H200, 2026-11-22, torch 2.11,
        triton 3.6).
        """
        ticket = 1
        if gl.program_id(0) < self.by_id:
            ticket = begin_claim(self.words + WORK_CLAIMS + gl.program_id(0))
        return ticket

    @gluon.jit
    def first(self, ticket):
        """The place of a CTA's first work tile: its own number, or, if somebody else has come to
        it, the next one.
        """
        place = gl.program_id(0)
        if end_draw(ticket) != 0:
            place = self.settle(begin_draw(self.words))
        return place

    @gluon.jit
    def settle(self, ticket):
        """The drawn place; one below `by_id` only if its CTA has not come to it. Work tiles
        that may wait for others are not below, so it is no matter in which order these are made.
        """
        place = end_draw(ticket)
        searching = place < self.by_id
        while searching:
            searching = end_draw(begin_claim(self.words + WORK_CLAIMS + place)) != 0
            if searching:
                place = end_draw(begin_draw(self.words))
                searching = place < self.by_id
        return place

    @gluon.jit
    def close(self, place):
        """Every CTA draws once in vain. The last of these draws clears counter and claims for the
        next launch: nobody draws or claims after it, and the end of the kernel orders it.
        """
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        if place == self.tiles.count + self.tiles.ctas - 1:
            words = gl.arange(0, WORK_WORDS, layout)
            zeros = gl.zeros([WORK_WORDS], gl.int32, layout)
            gl.store(self.words + words, zeros, mask=words < WORK_CLAIMS + self.by_id)


@aggregate
class WorkExchange:
    """The place of a work tile in shared memory, from the producer warp to all other partitions;
    and where its tile lies, which takes some divisions, so that the MMA warps need not find it
    between their tiles. Of the place, the owner, the row and the column the first NUMBERS travel.
    """

    numbers: Shared
    full: Shared
    empty: Shared
    NUMBERS: gl.constexpr

    @gluon.jit
    def hand_out(self, place, phase, owner=0, row=0, col=0):
        """From the producer warp to all others, once they have taken the one before. `phase` is 0
        and 1 in turn, on both sides; gives the next.
        """
        mbarrier.wait(self.empty, phase ^ 1)
        numbers = (place, owner, row, col)
        for which in gl.static_range(self.NUMBERS):
            self._write(which, numbers[which])
        barrier()
        mbarrier.arrive(self.full, count=1)
        return phase ^ 1

    @gluon.jit
    def take(self, phase, NUM_WARPS: gl.constexpr):
        """In a partition of `NUM_WARPS` warps: the next place, and the next phase."""
        mbarrier.wait(self.full, phase)
        place = self._read(0, NUM_WARPS)
        barrier()  # every warp has read it
        mbarrier.arrive(self.empty, count=1)
        return place, phase ^ 1

    @gluon.jit
    def take_tile(self, phase, NUM_WARPS: gl.constexpr):
        """`take`, and between the two the owner, the row and the column of the tile."""
        mbarrier.wait(self.full, phase)
        place = self._read(0, NUM_WARPS)
        owner = place * 0
        row = owner
        col = owner
        if self.NUMBERS > 1:
            owner = self._read(1, NUM_WARPS)
        if self.NUMBERS > 2:
            row = self._read(2, NUM_WARPS)
            col = self._read(3, NUM_WARPS)
        barrier()  # every warp has read them
        mbarrier.arrive(self.empty, count=1)
        return place, owner, row, col, phase ^ 1

    @gluon.jit
    def _write(self, which: gl.constexpr, number):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.numbers.index(which).store(gl.full([1], number, gl.int32, layout))

    @gluon.jit
    def _read(self, which: gl.constexpr, NUM_WARPS: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        return uniform(gl.max(self.numbers.index(which).load(layout), 0))


@gluon.jit
def new_exchange(takers: gl.constexpr, NUMBERS: gl.constexpr = 4):
    """For so many partitions that take."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=takers)
    return WorkExchange(numbers, full, empty, NUMBERS)
