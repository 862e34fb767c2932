"""The tile scheduler of the Hopper kernels: a list of items, and CTAs that draw from it.

An item is a tile, or one of the parts along K of a tile. No item belongs to a CTA: the producer
warp draws the next one from a work counter in device memory while it loads the last k-tiles of the
one before, and hands it to the other warps through shared memory. So a CTA that gets no SM, because
another kernel holds it, holds up nothing, and one resident CTA makes all items.

What an item waits for, at other ranks or at [F], was drawn before it by a CTA that runs
(`docs/memory_model.md`, "Progress").
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flux_megatron.kernels.hopper_primitives import (
    barrier,
    begin_draw,
    claim,
    end_draw,
    uniform,
)
from flux_megatron.symm import signals

WORK_CLAIMS = gl.constexpr(signals.WORK_CLAIMS)
WORK_WORDS = gl.constexpr(signals.WORK_WORDS)


@gluon.jit
def steps_of_part(steps, part, PARTS: gl.constexpr):
    """First step of K of a part of a tile, and the first of the next part."""
    first = 0
    last = 0
    # By comparison: by a division the loop over these steps would stay in vector registers, which
    # makes the products 10 % slower (4 x H200, 2026-11-21, triton 3.6).
    for i in gl.static_range(PARTS):
        if part == i:
            first = steps * i // PARTS
            last = steps * (i + 1) // PARTS
    return first, last


@gluon.jit
def tile_of_work(
    item, steps, cut_first, cut_last, split_first, CUT: gl.constexpr, SPLIT: gl.constexpr
):
    """Tile of an item, its first and last step of K, and the number of the part (0: has step 0) of
    how many, and of the cut tile among all that are cut.

    An item is a tile or, of two kinds of tiles, a part of K: tiles `cut_first` to `cut_last` are
    cut into CUT parts, so that all CTAs have work before what comes next can begin; the tiles of
    items from `split_first` on, those of the last wave, into SPLIT, so that it is short
    (`hopper_cuts.Cuts`).

    Parts of a tile are neighbours and part 0, which adds the others, is the last of them: it waits
    only for items that have been drawn before it.
    """
    tile = item
    first = 0
    last = steps
    part = 0
    parts = 1
    cut = 0
    if CUT > 1:
        place = item - cut_first
        if place >= 0:
            cuts = cut_last - cut_first
            if place < cuts * CUT:
                cut = place // CUT
                part = CUT - 1 - place % CUT
                parts = CUT
                tile = cut_first + cut
                first, last = steps_of_part(steps, part, CUT)
            else:
                tile = item - cuts * (CUT - 1)
    if SPLIT > 1:
        place = item - split_first
        if place >= 0:
            which = place // SPLIT
            cut = cut_last - cut_first + which
            part = SPLIT - 1 - place % SPLIT
            parts = SPLIT
            tile = split_first - (cut_last - cut_first) * (CUT - 1) + which
            first, last = steps_of_part(steps, part, SPLIT)
    return tile, first, last, part, parts, cut


@gluon.jit
def item_exchange(takers: gl.constexpr):
    """Shared memory for `hand_out` and `take_item`, for so many partitions that take: an item, its
    full barrier and its empty barrier.
    """
    item_buf = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(item_full, count=1)
    mbarrier.init(item_empty, count=takers)
    return item_buf, item_full, item_empty


@gluon.jit
def first_item(work, by_id):
    """The first item of a CTA: that of its own number, if it is below `by_id` and nobody else has
    come to it, else the next one. Neighbours of SMs then begin with neighbours of tiles, which
    share operands: drawn at random, GEMM+RS 2048 x 12288 x 12288 took 0.8 % longer (H200,
    2026-11-22, torch 2.11, triton 3.6).
    """
    item = gl.program_id(0)
    mine = item < by_id
    if mine:
        mine = claim(work + WORK_CLAIMS + item)
    if not mine:
        item = settle(end_draw(begin_draw(work)), work, by_id)
    return item


@gluon.jit
def settle(item, work, by_id):
    """The drawn item; one below `by_id` only if its CTA has not come to it. Items that may wait for
    others are not below, so it is no matter in which order these are made.
    """
    searching = item < by_id
    while searching:
        searching = not claim(work + WORK_CLAIMS + item)
        if searching:
            item = end_draw(begin_draw(work))
            searching = item < by_id
    return item


@gluon.jit
def close_draws(item, works, work, by_id, NUM_PROGRAMS: gl.constexpr):
    """Every CTA draws once in vain. The last of these draws clears counter and claims for the next
    launch: nobody draws or claims after it, and the end of the kernel orders it.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if item == works + NUM_PROGRAMS - 1:
        words = gl.arange(0, WORK_WORDS, layout)
        zeros = gl.zeros([WORK_WORDS], gl.int32, layout)
        gl.store(work + words, zeros, mask=words < WORK_CLAIMS + by_id)


@gluon.jit
def hand_out(item, item_buf, item_full, item_empty, phase):
    """From the producer warp to all others, once they have taken the one before. `phase` is 0 and 1
    in turn, on both sides; gives the next.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(item_empty, phase ^ 1)
    item_buf.store(gl.full([1], item, gl.int32, layout))
    barrier()
    mbarrier.arrive(item_full, count=1)
    return phase ^ 1


@gluon.jit
def take_item(item_buf, item_full, item_empty, phase, NUM_WARPS: gl.constexpr):
    """In a partition of `NUM_WARPS` warps: the next item, and the next phase."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    mbarrier.wait(item_full, phase)
    item = uniform(gl.max(item_buf.load(layout), 0))
    barrier()  # every warp has read it
    mbarrier.arrive(item_empty, count=1)
    return item, phase ^ 1
