"""Which CTA of a Triton kernel makes which tile: each draws the next one from a counter.

A list of tiles has sections; a tile may wait only for tiles of earlier sections, of any rank. Draws
go in order, so one resident CTA a rank suffices. Nothing here orders memory.

begin_draw .. end_draw  asks for the next tile, and waits for the number where it is used
first_tile, settle      the first tile of a CTA goes by its number, if no other CTA has claimed it
close_draws             the last draw in vain clears counter and claims for the next launch
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import INTERPRETED
from flux_megatron.symm import signals

_CLAIMS = tl.constexpr(signals.WORK_CLAIMS)
_WORDS = tl.constexpr(signals.WORK_WORDS)


@triton.jit
def _begin_draw_device(work_counter, NUM_WARPS: tl.constexpr):
    # One element a thread, so that threads wait for the number where they use it: Triton's own
    # atomic broadcasts it at once, and all threads wait there.
    threads = tl.arange(0, 32 * NUM_WARPS)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l,r",
        [work_counter.to(tl.int64), threads],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _end_draw_device(ticket):
    return tl.max(ticket, 0)


@triton.jit
def _begin_draw_interpreted(work_counter, NUM_WARPS: tl.constexpr):
    return tl.atomic_add(work_counter, 1, sem="relaxed", scope="gpu")


@triton.jit
def _end_draw_interpreted(ticket):
    return ticket


begin_draw = _begin_draw_interpreted if INTERPRETED else _begin_draw_device
end_draw = _end_draw_interpreted if INTERPRETED else _end_draw_device


@triton.jit
def _claim(work, tile):
    return tl.atomic_xchg(work + _CLAIMS + tile, 1, sem="relaxed", scope="gpu") == 0


@triton.jit
def settle(tile, work):
    """The drawn tile. The first tile of a CTA counts only if that CTA has not claimed it; else draw
    the next one.
    """
    searching = tile < tl.num_programs(0)
    while searching:
        searching = not _claim(work, tile)
        if searching:
            tile = tl.atomic_add(work, 1, sem="relaxed", scope="gpu")
            searching = tile < tl.num_programs(0)
    return tile


@triton.jit
def first_tile(work):
    """The first tile of a CTA: that of its own number if no other CTA has claimed it, else the next
    one. A CTA owns no other tile, so a CTA without an SM, because another kernel holds it, delays
    no tile. `hopper.scheduler.TileScheduler.begin` says why the first tile goes by number.
    """
    tile = tl.program_id(0)
    if not _claim(work, tile):
        tile = settle(tl.atomic_add(work, 1, sem="relaxed", scope="gpu"), work)
    return tile


@triton.jit
def close_draws(tile, tiles, work):
    """Every CTA draws once in vain. The last of these draws clears counter and claims for the next
    launch: no CTA draws or claims after it, and the end of the kernel orders it.
    """
    if tile == tiles + tl.num_programs(0) - 1:
        words = tl.arange(0, _WORDS)
        tl.store(work + words, 0, mask=words < tl.num_programs(0) + _CLAIMS)
