"""The epilogue of AG+GEMM, in each warp group that multiplies: its rows of each tile get their bias
and are stored in y, while the next tile is multiplied. They go through shared memory in slices of
columns, so that a tile needs no more memory than the ring of operands leaves, and the first slices
are on their way while the last are converted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flux_megatron.kernels.gluon_versions import (
    Descriptor,
    Parts,
    Pointer,
    aggregate,
    tma_store,
)
from flux_megatron.kernels.hopper.ring import mma_layout, new_buffer
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.tile_order import Sizes


@aggregate
class Scales:
    """The scales of FP8 operands: of x and of w, a number each; unused for other dtypes."""

    x: Pointer
    w: Pointer
    SCALED: gl.constexpr

    @gluon.jit
    def load(self):
        """Their product. Load it before the MMAs of a tile, so that nothing waits behind them."""
        scale = 1.0
        if self.SCALED:
            scale = gl.load(self.x) * gl.load(self.w)
        return scale

    @gluon.jit
    def applied(self, out, scale):
        if self.SCALED:
            out = out * scale
        return out


@gluon.jit
def column_slices(out, COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The sums of each `COLUMNS` of a tile. They lie in registers of their own: nothing moves."""
    ROWS: gl.constexpr = out.shape[0]
    HALF: gl.constexpr = out.shape[1] // 2
    if HALF < COLUMNS:
        slices = (out,)
    else:
        left, right = gl.split(gl.permute(gl.reshape(out, (ROWS, 2, HALF)), (0, 2, 1)))
        left = gl.convert_layout(left, mma_layout(HALF, NUM_WARPS))
        right = gl.convert_layout(right, mma_layout(HALF, NUM_WARPS))
        slices = column_slices(left, COLUMNS, NUM_WARPS) + column_slices(right, COLUMNS, NUM_WARPS)
    return slices


@aggregate
class StoredTiles:
    """Epilogue of the MMA warps: multiply by the scales, add the bias, store."""

    y_desc: Descriptor
    y_bufs: Parts  # of slices
    scales: Scales
    bias: Pointer
    sizes: Sizes
    signals: Signals
    HAS_BIAS: gl.constexpr
    NUM_WARPS: gl.constexpr

    @gluon.jit
    def stored_through(self, y_bufs):
        """The same, in another partition, which needs slices of its own."""
        return StoredTiles(
            self.y_desc, y_bufs, self.scales, self.bias, self.sizes, self.signals, self.HAS_BIAS,
            self.NUM_WARPS,
        )  # fmt: skip

    @gluon.jit
    def accumulate(self, ring, grid, work, owner, multiplied, fetched, number):
        COLUMNS: gl.constexpr = self.y_desc.block_type.shape[1]
        scale = self.scales.load()
        out = ring.zeros(self.NUM_WARPS)
        out, multiplied = ring.multiply(out, work.first, work.last, multiplied, number)
        out = self.scales.applied(out, scale)
        return column_slices(out, COLUMNS, self.NUM_WARPS), False, multiplied, fetched

    @gluon.jit
    def finish(self, slices, row, col, behind, fetched, finished):
        COLUMNS: gl.constexpr = self.y_desc.block_type.shape[1]
        BUFFERS: gl.constexpr = len(self.y_bufs)
        tma.store_wait(pendings=0)
        for number in gl.static_range(len(slices)):
            at = col + number * COLUMNS
            out = slices[number]
            if self.HAS_BIAS:
                out = self._with_bias(out, at)
            if number >= BUFFERS:
                tma.store_wait(pendings=BUFFERS - 1)
            y_buf = self.y_bufs[number % BUFFERS]
            y_buf.store(out.to(self.y_desc.dtype))
            fence_async_shared()
            tma_store(self.y_desc, [row, at], y_buf)
        return fetched, finished

    @gluon.jit
    def _with_bias(self, out, col):
        layout: gl.constexpr = mma_layout(out.shape[1], self.NUM_WARPS)
        cols = col + gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
        bias = gl.load(self.bias + cols, mask=cols < self.sizes.N, other=0.0)
        return out + bias.to(gl.float32)[None, :]

    @gluon.jit
    def complete(self):
        tma.store_wait(pendings=0)


@gluon.jit
def new_slices(y_desc, COUNT: gl.constexpr):
    """For so many slices. Each is an allocation of its own: TMA may read one of them while the
    compiler lets the MMA warps write to the next, without a barrier of all threads.
    """
    buffers = (new_buffer(y_desc, []),)
    for _ in gl.static_range(1, COUNT):
        buffers = buffers + (new_buffer(y_desc, []),)
    return buffers
