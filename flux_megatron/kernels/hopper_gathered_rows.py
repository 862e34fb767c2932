"""Whose rows a tile of AG+GEMM multiplies, and when they are there; and the copy of this rank's own
rows to the gathered ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Descriptor, Number, Parts, aggregate
from flux_megatron.kernels.hopper_signals import Signals
from flux_megatron.kernels.hopper_tile_order import Sizes, ag_tile, row_in_shard, tile_in_groups


@aggregate
class GatheredRows:
    """Operands of the producer warp: x of this rank, and of others when it has come."""

    x_desc: Descriptor
    gathered_desc: Descriptor
    w_descs: Parts
    sizes: Sizes
    signals: Signals
    comm_rows: Number
    RAGGED: gl.constexpr

    @gluon.jit
    def deadline(self):
        return self.signals.deadline()

    @gluon.jit
    def none_arrived(self):
        return self.signals.none_arrived()

    @gluon.jit
    def load_ahead(self, ring, grid, work):
        """Of a local tile, which waits for nobody."""
        sizes = self.sizes
        ahead = 0
        if work.tile < grid.rows * grid.columns:
            m, n = tile_in_groups(work.tile, grid.rows, grid.columns, grid.GROUP_M)
            row = row_in_shard(m, sizes, self.RAGGED)
            ahead = ring.load_ahead(self.x_desc, self.w_descs, row, n * sizes.BLOCK_N, work)
        return ahead

    @gluon.jit
    def locate(self, tile, grid, tiles):
        """Whose rows a tile has, and its first row and column in y."""
        sizes = self.sizes
        source, m, n = ag_tile(tile, grid, tiles)
        row = source * sizes.M_shard + row_in_shard(m, sizes, self.RAGGED)
        return source, row, n * sizes.BLOCK_N

    @gluon.jit
    def load(self, ring, scheduler, work, source, row, col, loaded, arrived, deadline):
        sizes = self.sizes
        in_shard = row - source * sizes.M_shard
        if source == sizes.rank:
            loaded, ticket = ring.load_tile(
                self.x_desc, self.w_descs, in_shard, col, work, loaded, scheduler.words
            )
        else:
            # communication tiles of one source arrive in their order: the last one tells for all
            comm_tile = (min(in_shard + sizes.BLOCK_M, sizes.M_shard) - 1) // self.comm_rows
            comm_tiles = gl.cdiv(sizes.M_shard, self.comm_rows)
            arrived = self.signals.await_once(
                arrived, source, comm_tile, comm_tiles, work.tile, deadline
            )  # wait [A]
            loaded, ticket = ring.load_tile(
                self.gathered_desc, self.w_descs, row, col, work, loaded, scheduler.words
            )
        return loaded, ticket, arrived


@gluon.jit
def copy_local_shard(x, local_rows, exchange, sizes, tiles, COPY_LOCAL: gl.constexpr):
    """Two warps: with each work tile a share of x to the local shard of the gathered rows, if
    wanted.
    """
    BLOCK: gl.constexpr = 64 * 8 * 8  # 8 loads of 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [2], [0])
    if COPY_LOCAL:
        size = sizes.M_shard.to(gl.int64) * sizes.K
        blocks = gl.cdiv(size, BLOCK).to(gl.int32)
        place, phase = exchange.take(0, 2)
        while place < tiles.count:
            for block in range(place, blocks, tiles.count):
                offsets = block.to(gl.int64) * BLOCK + gl.arange(0, BLOCK, layout)
                inside = offsets < size
                gl.store(local_rows + offsets, gl.load(x + offsets, mask=inside), mask=inside)
            place, phase = exchange.take(phase, 2)
