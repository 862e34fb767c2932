"""`portable.gathered_gemm` for Hopper, in Gluon: the same bands, words and flags, at the speed of a
library GEMM.

    producer   draws tiles of the local shard, then of each band that has come, and loads operands
    MMA warps  two groups, which multiply half of each tile's rows, and store them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flux_megatron.kernels import descriptors, launch
from flux_megatron.kernels.gluon_versions import Descriptor, Number, Pointer, aggregate
from flux_megatron.kernels.hopper.config import (
    GROUP_WARPS,
    SLICE_COLUMNS,
    Config,
    common_config,
    lead,
    slice_buffers,
    warp_groups,
)
from flux_megatron.kernels.hopper.ring import new_ring
from flux_megatron.kernels.hopper.roles import multiply
from flux_megatron.kernels.hopper.scheduler import new_exchange
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.split_k import WorkTile, whole_tiles
from flux_megatron.kernels.hopper.stored_tiles import Scales, StoredTiles, new_slices
from flux_megatron.kernels.hopper.tile_order import Sizes, tile_in_groups
from flux_megatron.kernels.hopper_primitives import (
    arrives_acquire_sys,
    begin_draw,
    end_draw,
    uniform,
)
from flux_megatron.kernels.portable import gathered_gemm as portable
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import MAX_GROUPS, Tile
from flux_megatron.symm.program import Memory

GROUPS, BANDS = gl.constexpr(MAX_GROUPS), gl.constexpr(portable.BANDS)
FLAGS, WAITED = gl.constexpr(portable.FLAGS), gl.constexpr(portable.WAITED)
NO_TILE = gl.constexpr((1 << 31) - 1)


@dataclass(frozen=True, kw_only=True)
class GatheredConfig(Config):
    Y_BUFFERS: int
    HAS_BIAS: bool
    LEAD: int


@aggregate
class GatheredBands:
    """Operands of the producer warp: x of this rank, and of others in bands that have come."""

    x_desc: Descriptor
    blocks_desc: Descriptor
    w_desc: Descriptor
    sizes: Sizes
    table: Pointer
    words: Pointer
    bands: Number
    patience_us: Number

    @gluon.jit
    def begin(self, grid):
        """The first band of which tiles are left, before any draw."""
        sizes = self.sizes
        band = gl.arange(0, BANDS, gl.BlockedLayout([1], [32], [1], [0]))
        gathered = (band > 0) & (band <= self.bands)
        rows = gl.load(self.table + (2 * GROUPS - 1) + band, mask=gathered, other=0)
        tiles_m = (rows + sizes.BLOCK_M - 1) // sizes.BLOCK_M * (sizes.WORLD_SIZE - 1)
        tiles_m = gl.where(band == 0, grid.rows, tiles_m)
        left = gl.load(self.words + band) < tiles_m * grid.columns
        return uniform(gl.min(gl.where(left, band, self.bands + 1), 0))

    @gluon.jit
    def rows_of(self, band):
        """Of a shard."""
        rows = self.sizes.M_shard
        if band > 0:
            rows = uniform(gl.load(self.table + (2 * GROUPS - 1) + band))
        return rows

    @gluon.jit
    def next_tile(self, place, tiles, band, grid):
        """As the portable one."""
        sizes = self.sizes
        while place >= tiles:
            band += 1
            place = band * 0
            tiles = place + 1
            if band <= self.bands:
                here = band == 0
                if band > 0:
                    flag = self.words + FLAGS + band
                    here = arrives_acquire_sys(flag, self.words + WAITED, self.patience_us)
                if here:  # wait [V]
                    place = end_draw(begin_draw(self.words + band))
                    tiles = gl.cdiv(self.rows_of(band), sizes.BLOCK_M) * grid.columns
                    if band > 0:
                        tiles *= sizes.WORLD_SIZE - 1
                else:
                    band = self.bands + 1
        return place, tiles, band

    @gluon.jit
    def locate(self, place, band, grid):
        """The first row of a tile in x or in the blocks, and in y, and its column. The last tiles
        of a ragged band end with it: they make some rows of those before again, to the same bits.
        """
        sizes = self.sizes
        m, n = tile_in_groups(place, grid.rows, grid.columns, grid.GROUP_M)
        row = min(m * sizes.BLOCK_M, sizes.M_shard - sizes.BLOCK_M)
        y_row = sizes.rank * sizes.M_shard + row
        if band > 0:
            first = uniform(gl.load(self.table + (GROUPS - 1) + band))
            rows = self.rows_of(band)
            tiles_m = gl.cdiv(rows, sizes.BLOCK_M)
            m, n = tile_in_groups(
                place, tiles_m * (sizes.WORLD_SIZE - 1), grid.columns, grid.GROUP_M
            )
            source = (sizes.rank + 1 + m // tiles_m) % sizes.WORLD_SIZE
            row = min(m % tiles_m * sizes.BLOCK_M, rows - sizes.BLOCK_M)
            y_row = source * sizes.M_shard + first + row
            row += sizes.WORLD_SIZE * first + source * rows
        return uniform(row), uniform(y_row), uniform(n * sizes.BLOCK_N)


@gluon.jit
def produce_bands(operands, ring, exchange):
    """One warp: draws this CTA's tiles and loads their operands."""
    grid = operands.sizes.grid_here()
    band = operands.begin(grid) - 1
    place, tiles, band = operands.next_tile(band * 0, band * 0, band, grid)
    loaded = 0
    phase = 0
    while band <= operands.bands:
        row, y_row, col = operands.locate(place, band, grid)
        phase = exchange.hand_out(place, phase, 0, y_row, col)
        work = WorkTile(place, 0, grid.k_tiles, 0, 1, 0)
        words = operands.words + band
        if band == 0:
            loaded, ticket = ring.load_tile(
                operands.x_desc, operands.w_desc, row, col, work, loaded, words
            )
        else:
            loaded, ticket = ring.load_tile(
                operands.blocks_desc, operands.w_desc, row, col, work, loaded, words
            )
        place, tiles, band = operands.next_tile(end_draw(ticket), tiles, band, grid)
    exchange.hand_out(NO_TILE, phase)


# no number compiles a kernel of its own
@gluon.jit(do_not_specialize=["rank", "bands", "step_us", "M_shard", "N", "K"])
def hopper_gathered_gemm_kernel(
    x_desc, blocks_desc, w_desc, y_desc, bias, table, words, rank, bands, step_us, M_shard, N, K,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1 if CONFIG.LAYOUT_NN else 0]
    NUM_WARPS: gl.constexpr = CONFIG.NUM_WARPS
    Y_BUFFERS: gl.constexpr = CONFIG.Y_BUFFERS
    sizes = Sizes(rank, M_shard, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    tiles = whole_tiles(NO_TILE, gl.num_programs(0))
    exchange = new_exchange(2)
    ring = new_ring(x_desc, w_desc, CONFIG.STAGES, CONFIG.LAYOUT_NN, 2, CONFIG.LEAD)
    patience_us = step_us * gl.program_id(0)
    operands = GatheredBands(
        x_desc, blocks_desc, w_desc, sizes, table, words, bands, patience_us
    )  # fmt: skip
    epilogue = StoredTiles(
        y_desc, new_slices(y_desc, Y_BUFFERS), Scales(words, words, False), bias, sizes,
        Signals(words, words, 0, 0), CONFIG.HAS_BIAS, NUM_WARPS,
    )  # fmt: skip
    beside = epilogue.stored_through(new_slices(y_desc, Y_BUFFERS))
    fence_async_shared()  # TMA arrives at some of the barriers
    gl.warp_specialize(
        [
            (multiply, (epilogue, ring.of_group(0), exchange, tiles, None, NUM_WARPS)),
            (multiply, (beside, ring.of_group(1), exchange, tiles, None, NUM_WARPS)),
            (produce_bands, (operands, ring, exchange)),
        ],
        [NUM_WARPS, 1],
        [232, 40],
    )


@lru_cache(maxsize=256)  # a call of new sizes would wait for a dataclass
def _compiled_for(shards: int, layout: str, tile: Tile, has_bias: bool) -> GatheredConfig:
    """What each of two groups multiplies by."""
    assert warp_groups(tile) == 2, f"{tile} given, {2 * GROUP_WARPS} warps expected"
    return GatheredConfig(
        **{**common_config(shards, layout, tile), "NUM_WARPS": GROUP_WARPS},
        Y_BUFFERS=slice_buffers(tile, None), HAS_BIAS=has_bias, LEAD=lead(tile),
    )  # fmt: skip


def gathered_gemm(
    x: Memory, blocks: Memory, w: Memory, bias: Memory | None, y: Memory, *, table: Tensor | Memory,
    words: Memory, rank: int, bands: int, step_us: int, spare_sms: int, layout: str, tile: Tile,
) -> None:  # fmt: skip
    """As the portable one, for what `hopper.gemm.refuses_gathered` does not refuse."""
    (M_shard, K), N = x.shape, w.shape[0] if layout == "nt" else w.shape[1]
    shards = cdiv(blocks.shape[0], M_shard)
    tiles = shards * tiles_of_shard(M_shard, N, tile)
    described = descriptors.described
    launch_kernel(
        hopper_gathered_gemm_kernel, launch.persistent_grid(x.device, tiles, spare_sms),
        replace(tile, num_warps=GROUP_WARPS),
        (
            described(x, tile.block_m, tile.block_k),
            described(blocks, tile.block_m, tile.block_k),
            descriptors.described_w(w, layout, tile.block_k, tile.block_n),
            described(y, tile.block_m // 2, SLICE_COLUMNS),
            bias if bias is not None else x, table, words,
        ),
        (rank, bands, step_us), (M_shard, N, K),
        CONFIG=_compiled_for(shards, layout, tile, bias is not None),
    )  # fmt: skip
