"""Whose rows a tile of AG+GEMM multiplies, and when they are there; and the copy of this rank's own
rows to the gathered ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Descriptor, Number, aggregate
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.tile_order import (
    Sizes,
    ag_tile,
    tile_in_groups,
    tile_of_all_rows,
)
from flux_megatron.kernels.hopper_primitives import uniform


@aggregate
class GatheredRows:
    """Operands of the producer warp: x of this rank, and of others when it has come: in
    communication tiles of `comm_rows` rows, or all rows of a shard in K_PARTS parts of K. Tiles of
    a shard begin at `row_limit` at most.
    """

    x_desc: Descriptor
    gathered_desc: Descriptor
    w_desc: Descriptor
    sizes: Sizes
    signals: Signals
    comm_rows: Number
    row_limit: Number
    K_PARTS: gl.constexpr

    @gluon.jit
    def begin(self):
        return self.signals.deadline(), self.signals.none_arrived()

    @gluon.jit
    def load_ahead(self, ring, grid, work):
        """Of a local tile, which waits for nobody."""
        ahead = 0
        if self.K_PARTS > 1:
            source, m, n = tile_of_all_rows(work.tile, grid)
            if source == self.sizes.rank:
                ahead = self._load_ahead(ring, m, n, work)
        elif work.tile < grid.rows * grid.columns:
            m, n = tile_in_groups(work.tile, grid.rows, grid.columns, grid.GROUP_M)
            ahead = self._load_ahead(ring, m, n, work)
        return ahead

    @gluon.jit
    def _load_ahead(self, ring, m, n, work):
        sizes = self.sizes
        row = self._row_in_shard(m)
        return ring.load_ahead(self.x_desc, self.w_desc, row, n * sizes.BLOCK_N, work)

    @gluon.jit
    def _row_in_shard(self, m):
        """The first row of the tiles of row `m`. Those at the end of a ragged shard end with it:
        they make some rows of the tiles before again, to the same bits.
        """
        return uniform(min(m * self.sizes.BLOCK_M, self.row_limit))

    @gluon.jit
    def locate(self, tile, grid, tiles):
        """Whose rows a tile has, and its first row and column in y."""
        sizes = self.sizes
        if self.K_PARTS > 1:
            source, m, n = tile_of_all_rows(tile, grid)
        else:
            source, m, n = ag_tile(tile, grid, tiles)
        row = source * sizes.M_shard + self._row_in_shard(m)
        return source, row, n * sizes.BLOCK_N

    @gluon.jit
    def load(self, ring, scheduler, work, source, row, col, loaded, arrived, deadline):
        sizes = self.sizes
        in_shard = row - source * sizes.M_shard
        if source == sizes.rank:
            if self.K_PARTS > 1:
                arrived = self._await_others(work, arrived, deadline)
            loaded, ticket = ring.load_tile(
                self.x_desc, self.w_desc, in_shard, col, work, loaded, scheduler.words
            )
        elif self.K_PARTS > 1:
            loaded, ticket, arrived = self._load_parts(
                ring, scheduler, work, source, row, col, loaded, arrived, deadline
            )
        else:
            # communication tiles of one source arrive in their order: the last one tells for all
            comm_tile = (min(in_shard + sizes.BLOCK_M, sizes.M_shard) - 1) // self.comm_rows
            comm_tiles = gl.cdiv(sizes.M_shard, self.comm_rows)
            arrived = self.signals.await_once(
                arrived, source, comm_tile, comm_tiles, deadline
            )  # wait [A]
            loaded, ticket = ring.load_tile(
                self.gathered_desc, self.w_desc, row, col, work, loaded, scheduler.words
            )
        return loaded, ticket, arrived

    @gluon.jit
    def _await_others(self, work, arrived, deadline):
        """Wait until the other tiles of the column can begin: L2 loses what a local tile read of w
        long before. With 8 k-tiles read ahead 256 x 12288 x 12288 took 154 us instead of 136, with
        no such wait 222 (2 x H100, 2026-11-25, h100x2/k_parts.jsonl).
        """
        sizes = self.sizes
        k_tiles = gl.cdiv(sizes.K, sizes.BLOCK_K)
        part = min(work.first, k_tiles - 1) // gl.cdiv(k_tiles, self.K_PARTS)
        for distance in range(1, sizes.WORLD_SIZE):
            other = (sizes.rank + distance) % sizes.WORLD_SIZE
            arrived = self.signals.await_once(arrived, other, part, self.K_PARTS, deadline)
        return arrived

    @gluon.jit
    def _load_parts(self, ring, scheduler, work, source, row, col, loaded, arrived, deadline):
        """The k-tiles of each part of K when it has come."""
        part_k_tiles = gl.cdiv(gl.cdiv(self.sizes.K, self.sizes.BLOCK_K), self.K_PARTS)
        last_part = (work.last - 1) // part_k_tiles
        first = work.first
        for part in range(work.first // part_k_tiles, last_part):
            arrived = self.signals.await_once(
                arrived, source, part, self.K_PARTS, deadline
            )  # wait [A]
            last = (part + 1) * part_k_tiles
            loaded = ring.load_k_tiles(
                self.gathered_desc, self.w_desc, row, col, first, last, loaded
            )
            first = last
        arrived = self.signals.await_once(
            arrived, source, last_part, self.K_PARTS, deadline
        )  # wait [A]
        loaded, ticket = ring.load_tile(
            self.gathered_desc, self.w_desc, row, col, work.behind(first - work.first), loaded,
            scheduler.words,
        )  # fmt: skip
        return loaded, ticket, arrived


@gluon.jit
def copy_local_shard(
    x, local_rows, exchange, sizes, tiles, COPY_LOCAL: gl.constexpr, SCALED: gl.constexpr
):
    """Two warps: with each work tile a share of x to the local shard of the gathered rows, if
    wanted.
    """
    UNIT: gl.constexpr = 16 if SCALED else 8  # elements of 16 bytes
    BLOCK: gl.constexpr = 64 * 8 * UNIT  # 8 loads of 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([UNIT], [32], [2], [0])
    if COPY_LOCAL:
        columns = sizes.K // UNIT * UNIT  # whole units, as it is: say so
        size = sizes.M_shard.to(gl.int64) * columns
        blocks = gl.cdiv(size, BLOCK).to(gl.int32)
        place, phase = exchange.take(0, 2)
        while place < tiles.count:
            for block in range(place, blocks, tiles.count):
                offsets = block.to(gl.int64) * BLOCK + gl.arange(0, BLOCK, layout)
                inside = offsets < size
                gl.store(local_rows + offsets, gl.load(x + offsets, mask=inside), mask=inside)
            place, phase = exchange.take(phase, 2)
