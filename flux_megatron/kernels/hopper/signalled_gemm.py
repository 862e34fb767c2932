"""`portable.signalled_gemm` for Hopper, in Gluon: the same bands, table and counts, at the speed of
a library GEMM.

    producer   draws tiles, the tiles of the first band first, and loads their operands
    MMA warps  hand each finished tile to the store warp and go on with the next
    store warp stores it where its band lies in `out`, and counts it there when it is in memory [D]

The kernel waits for nobody. No tile is split along K.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flux_megatron import problem
from flux_megatron.kernels import descriptors, launch
from flux_megatron.kernels.gluon_versions import Descriptor, Pointer, aggregate, tma_store
from flux_megatron.kernels.hopper.config import Config, common_config
from flux_megatron.kernels.hopper.gemm_rs import AllRows
from flux_megatron.kernels.hopper.handed_tiles import run_roles
from flux_megatron.kernels.hopper.split_k import whole_tiles
from flux_megatron.kernels.hopper.tile_order import Sizes, tile_in_groups
from flux_megatron.kernels.hopper_primitives import complete_tma_stores, count_release_sys, uniform
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

GROUPS = gl.constexpr(problem.MAX_GROUPS)


@aggregate
class Bands:
    """The bands of y, as `portable.signalled_gemm.table_of` says them."""

    table: Pointer
    sizes: Sizes

    @gluon.jit
    def locate(self, tile, grid):
        """In a partition of one warp: a tile's band, its first row in x and in `out`, its column.

        The rows of all shards are one column of tiles: more rows to reuse w for.
        """
        sizes = self.sizes
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        firsts = gl.load(self.table + gl.arange(0, GROUPS, layout))
        band = uniform(gl.sum((firsts <= tile).to(gl.int32), 0)) - 1
        entry = self.table + band
        first_tile = uniform(gl.load(entry))
        first_row = uniform(gl.load(entry + GROUPS))
        rows = uniform(gl.load(entry + 2 * GROUPS))
        tiles_m = gl.cdiv(rows, sizes.BLOCK_M)
        m, n = tile_in_groups(
            tile - first_tile, sizes.WORLD_SIZE * tiles_m, grid.columns, sizes.GROUP_M
        )
        shard = m // tiles_m
        row = m % tiles_m * sizes.BLOCK_M
        x_row = shard * sizes.M_shard + first_row + row
        out_row = sizes.WORLD_SIZE * first_row + shard * rows + row
        return band, uniform(x_row), uniform(out_row), uniform(n * sizes.BLOCK_N)

    @gluon.jit
    def rows_of(self, tile, grid):
        """For the producer warp, which needs no owner."""
        _, row, _, col = self.locate(tile, grid)
        return 0, row, col


@aggregate
class CountedBands:
    """Where the store warp puts tiles: in `out`, each counted in its band's counter."""

    out_desc: Descriptor
    counters: Pointer
    bands: Bands
    sizes: Sizes

    @gluon.jit
    def store(self, place, grid, staging, finished):
        band, _, row, col = self.bands.locate(place, grid)
        mbarrier.wait(staging.full, finished & 1)
        tma_store(self.out_desc, [row, col], staging.tile)
        complete_tma_stores()
        count_release_sys(self.counters + band)  # signal [D]
        mbarrier.arrive(staging.empty, count=1)


# numbers that change from call to call must not compile a kernel each
@gluon.jit(do_not_specialize=["M_shard", "N", "K", "tile_count", "ctas"])
def hopper_signalled_gemm_kernel(
    x_desc, w_desc, out_desc, table, counters, work_words, M_shard, N, K, tile_count, ctas,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = out_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = out_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    sizes = Sizes(0, M_shard, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    tiles = whole_tiles(tile_count, ctas)
    bands = Bands(table, sizes)
    operands = AllRows(x_desc, w_desc, sizes, bands)
    targets = CountedBands(out_desc, counters, bands, sizes)
    run_roles(
        operands, targets, None, x_desc, w_desc, out_desc, tiles, work_words, False, CONFIG
    )  # fmt: skip


def signalled_gemm(
    x: Tensor, w: Tensor, out: Tensor, *, table: Tensor, tiles: int, shards: int, counters: Tensor,
    work_counter: Tensor, spare_sms: int, layout: str, tile: Tile,
) -> None:  # fmt: skip
    """As the portable one, for what `hopper.gemm.refuses_bands` does not refuse: a tile
    that is not whole would overwrite the rows of the next shard.
    """
    (M, K), N = x.shape, w.shape[0] if layout == "nt" else w.shape[1]
    grid = launch.persistent_grid(x.device, tiles, spare_sms)
    described = descriptors.described
    launch_kernel(
        hopper_signalled_gemm_kernel, grid, tile,
        (
            described(x, tile.block_m, tile.block_k),
            descriptors.described_w(w, layout, tile.block_k, tile.block_n),
            described(out, tile.block_m, tile.block_n),
            table, counters, work_counter,
        ),
        sizes=(M // shards, N, K, tiles, *grid),
        CONFIG=Config(**common_config(shards, layout, tile)),
    )  # fmt: skip
