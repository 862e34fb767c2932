"""What GEMM+AR adds to GEMM+RS on Hopper: sums go to every rank, and those of the others to y."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flux_megatron.kernels.gluon_versions import (
    Descriptor,
    Number,
    Pointer,
    Shared,
    aggregate,
    tma_load,
    tma_store,
)
from flux_megatron.kernels.hopper_epilogue import TileTargets
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    begin_draw,
    complete_tma_stores,
    count_acq_rel_gpu,
    end_draw,
    here,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.kernels.hopper_signals import Signals
from flux_megatron.kernels.hopper_tile_order import tile_in_groups

BANDS = gl.constexpr(MAX_COMM_TILES.value)  # of a shard at most, each with a signal [A]


class Gathering(NamedTuple):
    """What GEMM+AR adds: y [M, N] of all ranks' rows, the last of whom has fewer where R does not
    divide M; this rank's buffer in which the others store theirs, and those of all ranks; what the
    signals [A] announce; and the counter from which CTAs draw tiles to copy.
    """

    y: Any
    gathered: Any
    pointers: Any
    pad_pointers: Any
    pad: Any
    epoch: Any
    drawn: Any


NOT_GATHERING = Gathering(*(None,) * 7)


@aggregate
class GatheringTargets:
    """Those of GEMM+AR: a finished tile of the local shard goes to every rank's gathered buffer
    too, and the last of a band of tiles signals [A] there. What the others have stored in this
    rank's goes on to `result` [M, N]: before a local tile their tiles that lie `_lag` before it,
    while it is multiplied, and what is left behind the last work tile.

    A copy before a local tile waits only for tiles of smaller numbers, because their band ends
    before it. CTAs draw local tiles by their numbers, so of all ranks' copies the one of the
    smallest number can always go on.
    """

    scatter: TileTargets
    tiles_comm: Number
    gathered_desc: Descriptor
    gathered_pointers: Pointer
    pad_pointers: Pointer
    signals: Signals
    result: Pointer
    drawn: Pointer
    M: Number
    copied: Shared

    @gluon.jit
    def prepare(self, number, grid, staging, copies, deadline, sizes):
        number -= self._lag(grid)
        if number >= 0:
            for hops in range(1, sizes.WORLD_SIZE):
                self._copy(hops, number, grid, staging, copies, deadline, sizes)
                copies += 1
        return copies

    @gluon.jit
    def fetch(self, place, staging, fetched, sizes):
        self.scatter.fetch(place, staging, fetched, sizes)

    @gluon.jit
    def send(self, owner, hops, number, per_shard, staging, sizes, signals):
        self.scatter.send(owner, hops, number, per_shard, staging, sizes, signals)

    @gluon.jit
    def finish(self, m, n, number, per_shard, tile, sizes):
        rank = here(sizes.rank)
        at = [m * sizes.BLOCK_M, n * sizes.BLOCK_N]
        y_desc = self.scatter.y_desc
        tma_store(y_desc, at, tile)
        shard = rank.to(gl.int64) * sizes.M_shard * sizes.N
        for hops in range(1, sizes.WORLD_SIZE):
            peer = (rank + hops) % sizes.WORLD_SIZE
            gathered = gl.load(self.gathered_pointers + peer).to(gl.pointer_type(y_desc.dtype))
            theirs = tma.make_tensor_descriptor(
                gathered + shard, [sizes.M_shard, sizes.N], [sizes.N, 1],
                [sizes.BLOCK_M, sizes.BLOCK_N], y_desc.layout,
            )  # fmt: skip
            tma_store(theirs, at, tile)
        complete_tma_stores()
        band_tiles = gl.cdiv(per_shard, BANDS)
        band = number // band_tiles
        slot = rank * MAX_COMM_TILES + band
        arrivals = min(band_tiles, per_shard - band * band_tiles)
        if count_acq_rel_gpu(self.scatter.counters + slot, arrivals):
            for hops in range(1, sizes.WORLD_SIZE):
                peer = (rank + hops) % sizes.WORLD_SIZE
                pad = gl.load(self.pad_pointers + peer).to(gl.pointer_type(gl.int32))
                signal_release_sys(pad, slot, self.signals.epoch)  # signal [A]

    @gluon.jit
    def collect(self, staging, copies, grid, deadline, sizes):
        """Copy the tiles that lie `_lag` before no local tile. CTAs draw them, so most go to those
        that have nothing left to multiply.
        """
        per_shard = grid.rows * grid.columns
        first = max(per_shard - self._lag(grid), 0)
        tiles = (per_shard - first) * (sizes.WORLD_SIZE - 1)
        place = end_draw(begin_draw(self.drawn))
        while place < tiles:
            ticket = begin_draw(self.drawn)
            number = first + place // (sizes.WORLD_SIZE - 1)
            hops = 1 + place % (sizes.WORLD_SIZE - 1)
            self._copy(hops, number, grid, staging, copies, deadline, sizes)
            copies += 1
            place = end_draw(ticket)
        if place == tiles + gl.num_programs(0) - 1:
            gl.store(self.drawn, 0)  # every CTA has drawn in vain: the next launch begins at 0

    @gluon.jit
    def _lag(self, grid):
        """A band, and the tiles that are multiplied at a time, so that a copy hardly waits."""
        return gl.cdiv(grid.rows * grid.columns, BANDS) + gl.num_programs(0)

    @gluon.jit
    def _copy(self, hops, number, grid, staging, copies, deadline, sizes):
        """A tile of another rank's shard, when it is there. It may reach beyond the rows of the
        shard: those are left out here.
        """
        signals = self.signals
        source = (here(sizes.rank) + hops) % sizes.WORLD_SIZE
        slot = source * MAX_COMM_TILES + number // gl.cdiv(grid.rows * grid.columns, BANDS)
        wait_acquire_sys(signals.pad, slot, signals.epoch, deadline, signals.status)  # wait [A]
        group_m = min(grid.GROUP_M, grid.rows)
        m, n = tile_in_groups(number, grid.rows, grid.columns, group_m)
        dtype: gl.constexpr = self.gathered_desc.dtype
        first = source * sizes.M_shard
        row = m * sizes.BLOCK_M
        col = n * sizes.BLOCK_N
        mbarrier.expect(self.copied, self.gathered_desc.block_type.nbytes)
        tma_load(self.gathered_desc, [first + row, col], self.copied, staging.tile)
        theirs = tma.make_tensor_descriptor(
            self.result.to(gl.pointer_type(dtype)) + first.to(gl.int64) * sizes.N,
            [min(sizes.M_shard, self.M - first), sizes.N], [sizes.N, 1],
            [sizes.BLOCK_M, sizes.BLOCK_N], self.gathered_desc.layout,
        )  # fmt: skip
        mbarrier.wait(self.copied, copies & 1)
        tma_store(theirs, [row, col], staging.tile)
        tma.store_wait(pendings=0)
