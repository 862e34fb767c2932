"""What GEMM+AR of a small y has in place of a scatter and a gather: every rank stores its results
at all ranks, and each adds all of them up itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Descriptor, Number, Pointer, aggregate, tma_store
from flux_megatron.kernels.hopper.epilogue import store_in_slices
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    count_acq_rel_gpu,
    here,
    signal_release_sys,
)


@aggregate
class ExchangedTargets:
    """Where tiles go: to block `rank` [M, N] of every rank's receive buffer. The last one of all
    signals [B] at every rank. To this kernel, which has the rows of one rank, all tiles are local.
    """

    own_desc: Descriptor  # of this rank's block here
    received_pointers: Pointer
    pad_pointers: Pointer
    counters: Pointer
    pad: Pointer
    tiles_comm: Number
    rank: Number
    epoch: Number
    RANKS: gl.constexpr

    @gluon.jit
    def fetch(self, place, staging, fetched, sizes):
        pass

    @gluon.jit
    def send(self, owner, hops, number, per_shard, staging, sizes, signals):
        pass

    @gluon.jit
    def finish(self, m, n, number, per_shard, tile, sizes):
        dtype: gl.constexpr = self.own_desc.dtype
        row = m * sizes.BLOCK_M
        col = n * sizes.BLOCK_N
        tma_store(self.own_desc, [row, col], tile)
        block = here(self.rank).to(gl.int64) * sizes.M_shard * sizes.N
        for hops in range(1, self.RANKS):
            peer = (here(self.rank) + hops) % self.RANKS
            theirs = gl.load(self.received_pointers + peer).to(gl.pointer_type(dtype)) + block
            store_in_slices(theirs, sizes.M_shard, sizes.N, row, col, tile, self.own_desc)
        if count_acq_rel_gpu(self.counters, per_shard):
            for peer in range(self.RANKS):
                pad = gl.load(self.pad_pointers + peer).to(self.pad.dtype)
                slot = here(self.rank) * MAX_COMM_TILES
                signal_release_sys(pad, slot, self.epoch)  # signal [B]

    @gluon.jit
    def collect(self, staging, fetched, grid, sizes):
        pass
