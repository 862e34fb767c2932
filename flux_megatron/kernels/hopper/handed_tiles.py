"""Tiles that the MMA warps hand to a store warp as they are: those of experts, whose last rows of a
group may fill half a tile at most, and those of bands (`hopper.signalled_gemm`).

The producer knows which rows a tile has, so it says to the others which tiles are halves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flux_megatron.kernels.experts.hopper_rows import send_rows
from flux_megatron.kernels.gluon_versions import aggregate
from flux_megatron.kernels.hopper.epilogue import StagingTile, new_staging_tile
from flux_megatron.kernels.hopper.ring import mma_layout, new_ring
from flux_megatron.kernels.hopper.roles import multiply, produce
from flux_megatron.kernels.hopper.scheduler import TileScheduler, new_exchange
from flux_megatron.kernels.hopper.tile_order import Sizes


@aggregate
class HandedTiles:
    """Epilogue of the MMA warps: the store warp has it. With HALVES a tile with an odd `owner` is
    multiplied as half a one, by all MMA warps.
    """

    staging: StagingTile
    sizes: Sizes
    HALVES: gl.constexpr
    NUM_WARPS: gl.constexpr

    @gluon.jit
    def accumulate(self, ring, grid, work, owner, multiplied, fetched, number):
        ACROSS: gl.constexpr = self.NUM_WARPS // 4
        half: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, ACROSS], [16, self.sizes.BLOCK_N // ACROSS, 16]
        )
        whole: gl.constexpr = mma_layout(self.sizes.BLOCK_N, self.NUM_WARPS)
        if self.HALVES and owner % 2 == 1:
            halves = ring.of_rows(self.sizes.BLOCK_M // 2)
            multiplied = self._hand_over(halves, work, multiplied, number, half)
        else:
            multiplied = self._hand_over(ring, work, multiplied, number, whole)
        return (), False, multiplied, fetched

    @gluon.jit
    def _hand_over(self, ring, work, multiplied, number, LAYOUT: gl.constexpr):
        sums = gl.zeros((ring.ROWS, self.sizes.BLOCK_N), gl.float32, LAYOUT)
        sums, multiplied = ring.multiply(sums, work.first, work.last, multiplied)
        self.staging.hand_over(sums, number)
        return multiplied

    @gluon.jit
    def finish(self, outs, row, col, behind, fetched, finished):
        return fetched, finished

    @gluon.jit
    def complete(self):
        pass


@gluon.jit
def store_groups(targets, staging, exchange, tiles):
    """One warp: stores each finished tile."""
    grid = targets.sizes.grid_here()
    finished = 0
    place, phase = exchange.take(0, 1)
    while place < tiles.count:
        targets.store(place, grid, staging, finished)
        finished += 1
        place, phase = exchange.take(phase, 1)


@gluon.jit
def run_roles(
    operands, targets, moved, x_desc, w_desc, made_desc, tiles, work_words,
    ROUTED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """All roles of a kernel whose tiles, of the block of `made_desc`, are handed over. Two more
    warps send the rows `moved`, unless that is None.

    ROUTED: only the device knows the rows, so there may be halves, and fewer tiles than CTAs.
    """
    exchange = new_exchange(2, 2 if ROUTED else 1)
    ring = new_ring(x_desc, w_desc, CONFIG.STAGES, CONFIG.LAYOUT_NN)
    staging = new_staging_tile(made_desc, made_desc, CONFIG.NUM_WARPS)
    epilogue = HandedTiles(staging, operands.sizes, ROUTED, CONFIG.NUM_WARPS)
    by_id = tiles.ctas
    if ROUTED:
        by_id = min(tiles.ctas, tiles.count)
    scheduler = TileScheduler(tiles, work_words, by_id)
    fence_async_shared()  # TMA arrives at some of the barriers
    REGISTERS: gl.constexpr = 80 if ROUTED else 40
    if moved is None:
        gl.warp_specialize(
            [
                (multiply, (epilogue, ring, exchange, tiles, None, CONFIG.NUM_WARPS)),
                (produce, (operands, ring, exchange, scheduler)),
                (store_groups, (targets, staging, exchange, tiles)),
            ],
            [1, 1],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (epilogue, ring, exchange, tiles, None, CONFIG.NUM_WARPS)),
                (produce, (operands, ring, exchange, scheduler)),
                (store_groups, (targets, staging, exchange, tiles)),
                (send_rows, (moved,)),
            ],
            [1, 1, 2],
            [REGISTERS, REGISTERS, REGISTERS],
        )
