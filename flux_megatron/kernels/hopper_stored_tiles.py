"""The epilogue of AG+GEMM, in the MMA warps: each tile gets its bias and is stored in y, while the
next tile is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flux_megatron.kernels.gluon_versions import Parts, Pointer, aggregate, tma_store
from flux_megatron.kernels.hopper_ring import mma_layout
from flux_megatron.kernels.hopper_signals import Signals
from flux_megatron.kernels.hopper_split_k import WorkTiles
from flux_megatron.kernels.hopper_tile_order import Sizes, ag_tile, row_in_shard


@aggregate
class StoredTiles:
    """Epilogue of the MMA warps: add the bias, store."""

    y_descs: Parts
    y_bufs: Parts
    bias: Pointer
    sizes: Sizes
    signals: Signals
    tiles: WorkTiles
    HAS_BIAS: gl.constexpr
    RAGGED: gl.constexpr
    NUM_WARPS: gl.constexpr

    @gluon.jit
    def deadline(self):
        return self.signals.deadline()

    @gluon.jit
    def accumulate(self, ring, grid, work, multiplied, fetched):
        outs = ring.zeros(self.NUM_WARPS)
        outs, multiplied = ring.multiply(outs, work.first, work.last, multiplied)
        return outs, False, multiplied, fetched

    @gluon.jit
    def finish(self, outs, grid, tile, behind, fetched, finished):
        sizes = self.sizes
        source, m, n = ag_tile(tile, grid, self.tiles)
        col = n * sizes.BLOCK_N
        if self.HAS_BIAS:
            outs = self._with_bias(outs, col)
        tma.store_wait(pendings=0)
        for part in gl.static_range(len(outs)):
            self.y_bufs[part].store(outs[part].to(self.y_descs[part].dtype))
        fence_async_shared()
        row = source * sizes.M_shard + row_in_shard(m, sizes, self.RAGGED)
        for part in gl.static_range(len(outs)):
            at = [row, col + part * outs[0].shape[1]]
            tma_store(self.y_descs[part], at, self.y_bufs[part])
        return fetched, finished

    @gluon.jit
    def _with_bias(self, outs, col):
        biased = (self._part_with_bias(outs[0], col),)
        for part in gl.static_range(1, len(outs)):
            out = self._part_with_bias(outs[part], col + part * outs[0].shape[1])
            biased = biased + (out,)
        return biased

    @gluon.jit
    def _part_with_bias(self, out, col):
        layout: gl.constexpr = mma_layout(out.shape[1], self.NUM_WARPS)
        cols = col + gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
        bias = gl.load(self.bias + cols, mask=cols < self.sizes.N, other=0.0)
        return out + bias.to(gl.float32)[None, :]

    @gluon.jit
    def complete(self):
        tma.store_wait(pendings=0)
