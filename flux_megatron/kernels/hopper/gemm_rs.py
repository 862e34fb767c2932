"""GEMM+RS for Hopper, in Gluon: tiles of remote shards are sent on, local ones add what has come.

    this kernel  takes the tiles of rank+1, rank+2, ... first, of the local shard last. A tile of a
                 remote shard goes to its owner's receive buffer, block `rank`, one of two ways:
      copy engine  the tile is stored in `outgoing` and counted [D]; the copy engine waits [D] for
                   all tiles of a communication tile, pushes it and signals [B]: for large problems
      SMs          the tile is stored there over NVLink and counted [C]; the last of a
                   communication tile signals [B]: for small ones, where latency is all
    this kernel  in the tiles of the local shard: waits [B], fetches the other ranks' tiles while it
                 multiplies, adds them in fp32, rounds once and stores y; for GEMM+AR also where
                 they go to every rank from (`gathered_sums`)
    this kernel  for GEMM+AR, behind the last tile: waits [A], copies the other ranks' sums to y

`outgoing` and receive buffers hold whole tiles in the order in which they are made, so that a
communication tile is contiguous whatever the order of tiles, and rows beyond the shard need no
care. The sum is in fp32 and its order fixed: own result, then rank-1, rank-2, ...: rank-1 sends its
tiles for this rank first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flux_megatron.kernels import descriptors
from flux_megatron.kernels.gluon_versions import Descriptor, Number, aggregate
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper.config import Config, common_config
from flux_megatron.kernels.hopper.epilogue import (
    StagingTile,
    TileTargets,
    move_tiles,
    new_staging_tile,
)
from flux_megatron.kernels.hopper.exchanged_tiles import ExchangedTargets
from flux_megatron.kernels.hopper.gathered_sums import NOT_GATHERING, Gathering, GatheringTargets
from flux_megatron.kernels.hopper.ring import mma_layout, new_ring
from flux_megatron.kernels.hopper.roles import multiply, produce
from flux_megatron.kernels.hopper.scheduler import TileScheduler, new_exchange
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.split_k import Partials, WorkTiles
from flux_megatron.kernels.hopper.split_tiles import SplitK, chunk_count, split_last_wave
from flux_megatron.kernels.hopper.stored_tiles import Scales
from flux_megatron.kernels.hopper.tile_order import InTurns, Sizes
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel, partial_sums
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling, result_dtype, scales_or
from flux_megatron.symm import program
from flux_megatron.symm.program import Memory


@aggregate
class AllRows:
    """Operands of the producer warp: rows of x, there from the beginning. `order` says which rows
    a tile has.
    """

    x_desc: Descriptor
    w_desc: Descriptor
    sizes: Sizes
    order: object

    @gluon.jit
    def begin(self):
        return 0, 0  # it waits for nobody

    @gluon.jit
    def load_ahead(self, ring, grid, work):
        _, row, col = self.locate(work.tile, grid, None)
        return ring.load_ahead(self.x_desc, self.w_desc, row, col, work)

    @gluon.jit
    def load(self, ring, scheduler, work, owner, row, col, loaded, arrived, deadline):
        loaded, ticket = ring.load_tile(
            self.x_desc, self.w_desc, row, col, work, loaded, scheduler.words
        )
        return loaded, ticket, arrived

    @gluon.jit
    def locate(self, tile, grid, tiles):
        """Whose rows a tile has, and its first row in x and column in w."""
        return self.order.rows_of(tile, grid)


@aggregate
class SummedTiles:
    """Epilogue of the MMA warps: add the other ranks' tiles to local ones, and hand each tile to
    the store warp.
    """

    staging: StagingTile
    scales: Scales
    sizes: Sizes
    signals: Signals
    late: Number
    CHUNKS: gl.constexpr
    LAYOUT: gl.constexpr

    @gluon.jit
    def accumulate(self, ring, grid, work, owner, multiplied, fetched, number):
        """A local tile is made in CHUNKS of K: during each another rank's tile is fetched, and
        behind the last one those that are left. But where nothing follows, nothing is worth a wait
        before the last MMA. What was fetched has been scaled: so FP8 has one chunk.
        """
        sizes = self.sizes
        LEFT: gl.constexpr = sizes.WORLD_SIZE - 1 - self.CHUNKS
        first = work.first
        late = (self.late != 0) | (work.last - first < grid.k_tiles)
        chunks = 1
        if owner == sizes.rank and not late:
            chunks = self.CHUNKS
        scale = self.scales.load()
        out = gl.zeros((sizes.BLOCK_M, sizes.BLOCK_N), gl.float32, self.LAYOUT)
        for chunk in range(chunks):
            until = first + (work.last - first) // (chunks - chunk)
            out, multiplied = ring.multiply(out, first, until, multiplied)
            out = self.scales.applied(out, scale)
            first = until
            if owner == sizes.rank and not late:
                out = self.staging.add_fetched(out, fetched, self.LAYOUT)
                fetched += 1
        if LEFT > 0:
            if owner == sizes.rank and not late:
                for _ in range(LEFT):
                    out = self.staging.add_fetched(out, fetched, self.LAYOUT)
                    fetched += 1
        return (out,), (owner == sizes.rank, late), multiplied, fetched

    @gluon.jit
    def finish(self, outs, row, col, behind, fetched, finished):
        out = outs[0]
        local, late = behind
        if local and late:
            for _ in range(self.sizes.WORLD_SIZE - 1):
                out = self.staging.add_fetched(out, fetched, self.LAYOUT)
                fetched += 1
        if self.staging.SCALED:
            self.staging.hand_over_scaled(out, finished, local)
        else:
            self.staging.hand_over(out, finished)
        return fetched, finished + 1

    @gluon.jit
    def complete(self):
        pass


@dataclass(frozen=True, kw_only=True)
class RsConfig(Config):
    BY_SM: bool
    CHUNKS: int
    RANKS: int = 1  # more: all tiles go to all ranks, x has the rows of one


# no number compiles a kernel of its own
@gluon.jit(
    do_not_specialize=[
        "rank", "epoch", "timeout_ns", "tiles_comm", "behind", "gather_epoch", "M", "M_shard", "N",
        "K", "late", "work_tiles", "first_part", "parts", "cut_1", "cut_2", "cut_3", "by_id",
    ]
)  # fmt: skip
def hopper_gemm_rs_kernel(
    x_desc, w_desc, outgoing_desc, received_desc, y_desc, gathered_desc, sums_desc, x_scale,
    w_scale, partials, outgoing, received_pointers, pad_pointers, gathered_pointers, gather_pads,
    gather_pad, result, drawn, pad, status, counters, partial_counters, work_words, rank, epoch,
    timeout_ns: tl.int64, tiles_comm, behind, gather_epoch, M, M_shard, N, K, late, work_tiles,
    first_part, parts, cut_1, cut_2, cut_3, by_id, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = y_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    layout: gl.constexpr = mma_layout(BLOCK_N, CONFIG.NUM_WARPS)
    owner = rank
    if CONFIG.RANKS > 1:
        owner = rank - rank  # of all tiles: 0 of one
    sizes = Sizes(
        owner, M_shard, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    cuts = (cut_1, cut_2, cut_3)
    tiles = WorkTiles(work_tiles, gl.num_programs(0), first_part, parts, cuts, True)
    signals = Signals(pad, status, epoch, timeout_ns)
    exchange = new_exchange(2)
    ring = new_ring(
        x_desc, w_desc, CONFIG.STAGES, CONFIG.LAYOUT_NN, 1, 0, CONFIG.SCALED,
        CONFIG.SPLIT_ACCUMULATOR,
    )  # fmt: skip
    scales = Scales(x_scale, w_scale, CONFIG.SCALED)
    staging = new_staging_tile(y_desc, outgoing_desc, CONFIG.NUM_WARPS)
    order = sizes
    if sums_desc is not None:
        order = InTurns(sizes, tiles_comm, behind)
    operands = AllRows(x_desc, w_desc, sizes, order)
    epilogue = SummedTiles(staging, scales, sizes, signals, late, CONFIG.CHUNKS, layout)
    partial_tiles = Partials(partials, partial_counters, BLOCK_N, CONFIG.NUM_WARPS, 0, 1)
    targets = TileTargets(
        outgoing, outgoing_desc, received_desc, y_desc, received_pointers, pad_pointers,
        counters, tiles_comm, CONFIG.BY_SM, BLOCK_M + (outgoing_desc.dtype != y_desc.dtype),
    )  # fmt: skip
    if gathered_pointers is not None:
        sums_there = Signals(gather_pad, status, gather_epoch, timeout_ns)
        targets = GatheringTargets(
            targets, tiles_comm, gathered_desc, sums_desc, gathered_pointers, gather_pads,
            sums_there, result, drawn, M,
        )  # fmt: skip
    if CONFIG.RANKS > 1:
        targets = ExchangedTargets(
            y_desc, received_pointers, pad_pointers, counters, pad, tiles_comm, rank, epoch,
            CONFIG.RANKS,
        )  # fmt: skip
    fence_async_shared()  # TMA arrives at some of the barriers
    gl.warp_specialize(
        [
            (multiply, (epilogue, ring, exchange, tiles, partial_tiles, CONFIG.NUM_WARPS)),
            (produce, (operands, ring, exchange, TileScheduler(tiles, work_words, by_id))),
            (move_tiles, (targets, staging, exchange, tiles, order, sizes, signals)),
        ],
        [1, 1],
        [48, 40],  # with 40 both spill
    )


def _sizes(
    M_shard: int, N: int, K: int, world_size: int, device: torch.device, tile: Tile, before: int
) -> tuple[SplitK, tuple[int, ...]]:
    """What is split along K, and the numbers of a launch that follow from sizes. So many tiles of
    each remote shard come before all others.
    """
    shard_tiles, k_tiles = tiles_of_shard(M_shard, N, tile), cdiv(K, tile.block_k)
    ctas = hopper_config.resident_ctas(device)
    split = split_last_wave(shard_tiles * world_size, k_tiles, ctas, tile)
    remote = before * (world_size - 1)  # the tiles behind them wait for other ranks
    return split, (
        M_shard, N, K, int(shard_tiles <= split.ctas), *split.numbers(k_tiles),
        min(split.ctas, split.first_part, remote),
    )  # fmt: skip


@lru_cache(maxsize=256)  # a call of new sizes would wait for a dataclass
def _compiled_for(
    world_size: int, layout: str, tile: Tile, by_sm: bool, chunks: int, scaling: Scaling | None
) -> RsConfig:
    return RsConfig(**common_config(world_size, layout, tile, scaling), BY_SM=by_sm, CHUNKS=chunks)


def gemm_rs(
    x: Memory, w: Memory, *, outgoing: Memory, received: Memory, received_pointers: Memory,
    pad_pointers: Memory, pad: Memory, status: Memory, counters: Memory, partial_counters: Memory,
    work_words: Memory, rank: int, world_size: int, epoch: program.Number, timeout_ns: int,
    tiles_comm: int, layout: str, tile: Tile, by_sm: bool,
    gathering: Gathering | None = None, behind: int = 0, scaling: Scaling | None = None,
) -> Memory:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]), summed over ranks: y [M / R, N], or, if the call is
    `gathering` them, the caller's y [M, N]. If copy engines push the sums, tiles of the local shard
    come so many communication tiles `behind` remote ones.

    | tensor | shape, with T tiles [B_M, B_N] a shard |
    | --- | --- |
    | outgoing | [(R - 1) * T * B_M, B_N]: this rank's tiles for rank+1, ...; `by_sm`: unused |
    | received | [R * T * B_M, B_N]: the tiles that rank 0, 1, ... have sent to this rank |

    Tiles of e4m3 have a row more, which begins with their scale.
    """
    N = w.shape[0] if layout == "nt" else w.shape[1]
    M_shard, dtype = cdiv(x.shape[0], world_size), result_dtype(x, scaling)
    of_all = gathering or NOT_GATHERING
    if gathering:
        y, own = gathering.y, gathering.y[rank * M_shard : (rank + 1) * M_shard]
    else:
        y = own = x.new_empty(M_shard, N, dtype=dtype)
    block = (tile.block_m, tile.block_n)
    K = x.shape[1]
    chunks = 1 if scaling else chunk_count(world_size, cdiv(K, tile.block_k))
    before = tiles_of_shard(M_shard, N, tile)
    if of_all.sums is not None:
        before = min((behind + 1) * tiles_comm, before)
    config = _compiled_for(world_size, layout, tile, by_sm, chunks, scaling and scaling.kind)
    split, sizes = _sizes(M_shard, N, K, world_size, x.device, tile, before)
    elements = split.partials * tile.block_m * tile.block_n
    described = descriptors.described
    launch_kernel(
        hopper_gemm_rs_kernel, (split.ctas,), tile,
        (
            described(x, tile.block_m, tile.block_k),
            descriptors.described_w(w, layout, tile.block_k, tile.block_n),
            described(outgoing, *block), described(received, *block), described(own, *block),
            gathering and described(gathering.gathered, *block),
            of_all.sums and described(of_all.sums, *block), *scales_or(x, scaling),
            partial_sums(x, elements, partial_counters), outgoing, received_pointers, pad_pointers,
            of_all.pointers, of_all.pad_pointers, of_all.pad, of_all.y, of_all.drawn, pad, status,
            counters, partial_counters, work_words,
        ),
        (
            rank, epoch, timeout_ns, tiles_comm, behind, of_all.epoch,
            gathering and x.shape[0], *sizes,
        ),
        CONFIG=config,
    )  # fmt: skip
    return y
