"""What GEMM+AR adds to GEMM+RS on Hopper: sums go to every rank, and those of the others to y.

    SMs            the store warp copies each sum to every rank; the last of a communication tile
                   signals [A] there
    copy engines   that warp stores each sum in `sums` and counts it [D]; the copy engine waits [D]
                   for a communication tile, pushes it to every rank and signals [A]. So that sums
                   travel while others are made, remote and local tiles take turns (`InTurns`)

What `sums` and a gathered buffer hold for copy engines are whole tiles, in the order of their
numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flux_megatron.kernels.gluon_versions import (
    Descriptor,
    Number,
    Pointer,
    aggregate,
    tma_load,
    tma_store,
)
from flux_megatron.kernels.hopper.epilogue import TileTargets, store_in_slices
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.tile_order import tile_in_groups
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    begin_draw,
    complete_tma_stores,
    count_acq_rel_gpu,
    count_release_sys,
    end_draw,
    here,
    signal_release_sys,
)


class Gathering(NamedTuple):
    """What GEMM+AR adds: y [M, N] of all ranks' rows, the last of whom has fewer where R does not
    divide M; this rank's buffer in which the others store theirs, and those of all ranks; what the
    signals [A] announce; the counter from which CTAs draw tiles to copy; and, for copy engines,
    this rank's `sums`.
    """

    y: Any
    gathered: Any
    pointers: Any
    pad_pointers: Any
    pad: Any
    epoch: Any
    drawn: Any
    sums: Any = None


NOT_GATHERING = Gathering(*(None,) * 7)


@aggregate
class GatheringTargets:
    """Those of GEMM+AR: a finished tile of the local shard goes to every rank's gathered buffer
    too, and the last of a communication tile signals [A] there; or to `sums`, for copy engines.
    What has come from the others goes on to `result` [M, N].
    """

    scatter: TileTargets
    tiles_comm: Number
    gathered_desc: Descriptor
    sums_desc: object  # a descriptor, or None: SMs store them at every rank
    gathered_pointers: Pointer
    pad_pointers: Pointer
    signals: Signals
    result: Pointer
    drawn: Pointer
    M: Number

    @gluon.jit
    def fetch(self, place, staging, fetched, sizes):
        self.scatter.fetch(place, staging, fetched, sizes)

    @gluon.jit
    def send(self, owner, hops, number, per_shard, staging, sizes, signals):
        self.scatter.send(owner, hops, number, per_shard, staging, sizes, signals)

    @gluon.jit
    def finish(self, m, n, number, per_shard, tile, sizes):
        self.scatter.finish(m, n, number, per_shard, tile, sizes)
        comm_tile = number // self.tiles_comm
        counter = self.scatter.counters + sizes.rank * MAX_COMM_TILES + comm_tile
        if self.sums_desc is not None:
            tma_store(self.sums_desc, [number * sizes.BLOCK_M, 0], tile)
            complete_tma_stores()
            count_release_sys(counter)  # signal [D]
        else:
            arrivals = min(self.tiles_comm, per_shard - comm_tile * self.tiles_comm)
            self._store_at_peers(m, n, comm_tile, counter, arrivals, tile, sizes)

    @gluon.jit
    def _store_at_peers(self, m, n, comm_tile, counter, arrivals, tile, sizes):
        shard = sizes.rank.to(gl.int64) * sizes.M_shard * sizes.N
        dtype: gl.constexpr = self.gathered_desc.dtype
        for hops in range(1, sizes.WORLD_SIZE):
            peer = (sizes.rank + hops) % sizes.WORLD_SIZE
            gathered = gl.load(self.gathered_pointers + peer).to(gl.pointer_type(dtype))
            store_in_slices(
                gathered + shard, sizes.M_shard, sizes.N, m * sizes.BLOCK_M, n * sizes.BLOCK_N,
                tile, self.gathered_desc,
            )  # fmt: skip
        if count_acq_rel_gpu(counter, arrivals):
            slot = sizes.rank * MAX_COMM_TILES + comm_tile
            for hops in range(1, sizes.WORLD_SIZE):
                peer = (sizes.rank + hops) % sizes.WORLD_SIZE
                pad = gl.load(self.pad_pointers + peer).to(gl.pointer_type(gl.int32))
                signal_release_sys(pad, slot, self.signals.epoch)  # signal [A]

    @gluon.jit
    def collect(self, staging, fetched, grid, sizes):
        """Copy the other ranks' sums from the gathered buffer to `result`, tile by tile. CTAs draw
        them, so most go to those that have nothing left to multiply.
        """
        signals = self.signals
        deadline = signals.deadline()
        per_shard = grid.rows * grid.columns
        comm_tiles = gl.cdiv(per_shard, self.tiles_comm)
        tiles = per_shard * (sizes.WORLD_SIZE - 1)
        arrived = signals.none_arrived()
        place = end_draw(begin_draw(self.drawn))
        while place < tiles:
            ticket = begin_draw(self.drawn)
            number = place // (sizes.WORLD_SIZE - 1)
            hops = 1 + place % (sizes.WORLD_SIZE - 1)
            source = (here(sizes.rank) + hops) % sizes.WORLD_SIZE
            arrived = signals.await_once(
                arrived, source, number // self.tiles_comm, comm_tiles, deadline
            )  # wait [A]
            group_m = min(grid.GROUP_M, grid.rows)
            m, n = tile_in_groups(number, grid.rows, grid.columns, group_m)
            row, col = source * sizes.M_shard + m * sizes.BLOCK_M, n * sizes.BLOCK_N
            if self.sums_desc is not None:
                row, col = (source * per_shard + number) * sizes.BLOCK_M, 0
            self._copy(row, col, source, m, n, staging, fetched, sizes)
            fetched += 1
            place = end_draw(ticket)
        if place == tiles + gl.num_programs(0) - 1:
            gl.store(self.drawn, 0)  # every CTA has drawn in vain: the next launch begins at 0

    @gluon.jit
    def _copy(self, from_row, from_col, source, m, n, staging, fetched, sizes):
        """A tile of the rows of `source`, to be found there in the gathered buffer. It may reach
        beyond its rows: those are left out here.
        """
        dtype: gl.constexpr = self.gathered_desc.dtype
        first = source * sizes.M_shard
        row = m * sizes.BLOCK_M
        col = n * sizes.BLOCK_N
        mbarrier.expect(staging.fetched, self.gathered_desc.block_type.nbytes)
        tma_load(self.gathered_desc, [from_row, from_col], staging.fetched, staging.tile)
        theirs = tma.make_tensor_descriptor(
            self.result.to(gl.pointer_type(dtype)) + first.to(gl.int64) * sizes.N,
            [min(sizes.M_shard, self.M - first), sizes.N], [sizes.N, 1],
            [sizes.BLOCK_M, sizes.BLOCK_N], self.gathered_desc.layout,
        )  # fmt: skip
        mbarrier.wait(staging.fetched, fetched & 1)
        tma_store(theirs, [row, col], staging.tile)
        tma.store_wait(pendings=0)
