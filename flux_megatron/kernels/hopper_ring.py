"""The ring of stages from the producer warp to the MMA warps of a Hopper kernel.

The producer runs ahead: it waits until a stage is `empty`, loads the operands of one k-tile into it
by TMA, and `full` completes when they are there. Two warp groups multiply: each wgmma reads its
stage while the one before finishes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flux_megatron.kernels.gluon_versions import Shared, aggregate, tma_load
from flux_megatron.kernels.hopper_primitives import begin_draw

DRAW_AHEAD = gl.constexpr(4)  # k-tiles before the last: 16 were no faster (tile_order.jsonl)


@aggregate
class OperandRing:
    """Stages of x [STAGES, BLOCK_M, BLOCK_K] and w, and their full and empty barriers; the first
    ROWS rows of x are multiplied.
    """

    x: Shared
    w: Shared
    full: Shared
    empty: Shared
    LAYOUT_NN: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def of_rows(self, rows: gl.constexpr):
        """The same ring, of tiles with so many rows."""
        return OperandRing(self.x, self.w, self.full, self.empty, self.LAYOUT_NN, rows)

    @gluon.jit
    def load_k_tiles(self, x_desc, w_desc, row, col, first, last, loaded, w_row=0):
        """Load k-tiles `first` to `last` of the tile at (row, col), each when its stage is empty.

        A w of layout [K, N] begins at `w_row` of its descriptor. `loaded` counts the k-tiles of
        this CTA so far; gives the new count.
        """
        STAGES: gl.constexpr = self.x.shape[0]
        BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
        for k_tile in range(first, last):
            stage = loaded % STAGES
            full = self.full.index(stage)
            k = k_tile * BLOCK_K
            mbarrier.wait(self.empty.index(stage), (loaded // STAGES & 1) ^ 1)
            mbarrier.expect(full, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(x_desc, [row, k], full, self.x.index(stage))
            if self.LAYOUT_NN:
                tma_load(w_desc, [w_row + k, col], full, self.w.index(stage))
            else:
                tma_load(w_desc, [col, k], full, self.w.index(stage))
            loaded += 1
        return loaded

    @gluon.jit
    def load_tile(self, x_desc, w_desc, row, col, work, loaded, work_words, w_row=0):
        """`load_k_tiles` of a work tile, and the draw of the next one before the last of them;
        gives its ticket too.
        """
        lead = max(work.first, work.last - DRAW_AHEAD)
        loaded = self.load_k_tiles(x_desc, w_desc, row, col, work.first, lead, loaded, w_row)
        ticket = begin_draw(work_words)
        loaded = self.load_k_tiles(x_desc, w_desc, row, col, lead, work.last, loaded, w_row)
        return loaded, ticket

    @gluon.jit
    def multiply(self, out, first, last, multiplied):
        """out + the product of k-tiles `first` to `last`, in the MMA warps.

        `multiplied` counts the k-tiles of this CTA so far; gives the new count too.
        """
        acc = warpgroup_mma_init(out)
        for k_tile in range(first, last):
            acc = self.multiply_k_tile(acc, multiplied, k_tile == first)
            multiplied += 1
        STAGES: gl.constexpr = self.x.shape[0]
        out = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(self.empty.index((multiplied + STAGES - 1) % STAGES), count=1)
        return out, multiplied

    @gluon.jit
    def multiply_k_tile(self, acc, multiplied, first):
        """acc += the next k-tile, issued; the MMA before it is done, and its stage given back.

        `first`: there is no MMA before it in flight.
        """
        STAGES: gl.constexpr = self.x.shape[0]
        stage = multiplied % STAGES
        mbarrier.wait(self.full.index(stage), multiplied // STAGES & 1)
        x_buf = self.x.index(stage)
        if self.x.shape[1] > self.ROWS:
            x_buf = x_buf.slice(0, self.ROWS)
        w_buf = self.w.index(stage)
        if self.LAYOUT_NN:
            acc = warpgroup_mma(x_buf, w_buf, acc, is_async=True)
        else:
            acc = warpgroup_mma(x_buf, w_buf.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        before = (multiplied + STAGES - 1) % STAGES
        mbarrier.arrive(self.empty.index(before), count=1, pred=not first)
        return acc


@gluon.jit
def new_ring(x_desc, w_desc, STAGES: gl.constexpr, LAYOUT_NN: gl.constexpr):
    """The ring for the blocks of two descriptors."""
    dtype: gl.constexpr = x_desc.dtype
    x = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return OperandRing(x, w, full, empty, LAYOUT_NN, x_desc.block_type.shape[0])
