"""AG+GEMM for Hopper, in Gluon: the protocol of `kernels/portable/ag_gemm.py`, at the speed of a
library GEMM.

    copy engine  pushes x of rank s into gathered[s] of every rank, then signals [A]
    this kernel  takes the tiles of the local shard first, read from x itself, then those of
                 rank+1, rank+2, ...: waits [A] before the first load of a tile's rows

Few rows come in parts of K: the kernel takes the tiles column by column, and waits [A] before the
first load of a part.

With one rank this is a plain GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flux_megatron.kernels import descriptors
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper.config import (
    DEEP,
    SLICE_COLUMNS,
    Config,
    common_config,
    lead,
    slice_buffers,
    warp_groups,
)
from flux_megatron.kernels.hopper.gathered_rows import GatheredRows, copy_local_shard
from flux_megatron.kernels.hopper.ring import new_ring
from flux_megatron.kernels.hopper.roles import multiply, produce
from flux_megatron.kernels.hopper.scheduler import TileScheduler, new_exchange
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.split_k import Partials, WorkTiles
from flux_megatron.kernels.hopper.split_tiles import SplitK, is_ragged, split_last_wave
from flux_megatron.kernels.hopper.stored_tiles import Scales, StoredTiles, new_slices
from flux_megatron.kernels.hopper.tile_order import Sizes
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel, partial_sums
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling, result_dtype, scales_or
from flux_megatron.symm.program import Memory, Number
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS

NO_LIMIT = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class AgConfig(Config):
    BLOCK_N: int
    Y_BUFFERS: int
    HAS_BIAS: bool
    COPY_LOCAL: bool
    K_PARTS: int  # in which the rows of other ranks come
    GROUPS: int  # partitions that multiply
    LEAD: int


# no number compiles a kernel of its own
@gluon.jit(
    do_not_specialize=[
        "rank", "epoch", "timeout_ns", "comm_rows", "M_shard", "N", "K", "row_limit", "work_tiles",
        "first_part", "parts", "cut_1", "cut_2", "cut_3", "by_id",
    ]
)  # fmt: skip
def hopper_ag_gemm_kernel(
    x_desc, gathered_desc, w_desc, y_desc, bias, x_scale, w_scale, x, local_rows, partials, pad,
    status, counters, work_words, rank, epoch, timeout_ns: tl.int64, comm_rows, M_shard, N,
    K, row_limit, work_tiles, first_part, parts, cut_1, cut_2, cut_3, by_id, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    Y_BUFFERS: gl.constexpr = CONFIG.Y_BUFFERS
    NUM_WARPS: gl.constexpr = CONFIG.NUM_WARPS
    GROUPS: gl.constexpr = CONFIG.GROUPS
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    COPY_LOCAL: gl.constexpr = CONFIG.COPY_LOCAL
    SCALED: gl.constexpr = CONFIG.SCALED
    sizes = Sizes(rank, M_shard, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    cuts = (cut_1, cut_2, cut_3)
    tiles = WorkTiles(work_tiles, gl.num_programs(0), first_part, parts, cuts, True)
    signals = Signals(pad, status, epoch, timeout_ns)
    exchange = new_exchange(GROUPS + 1 if COPY_LOCAL else GROUPS)
    ring = new_ring(
        x_desc, w_desc, CONFIG.STAGES, CONFIG.LAYOUT_NN, GROUPS, CONFIG.LEAD, SCALED,
        CONFIG.SPLIT_ACCUMULATOR,
    )  # fmt: skip
    scales = Scales(x_scale, w_scale, SCALED)
    operands = GatheredRows(
        x_desc, gathered_desc, w_desc, sizes, signals, comm_rows, row_limit, CONFIG.K_PARTS
    )
    epilogue = StoredTiles(
        y_desc, new_slices(y_desc, Y_BUFFERS), scales, bias, sizes, signals, CONFIG.HAS_BIAS,
        NUM_WARPS,
    )  # fmt: skip
    sums = Partials(partials, counters, BLOCK_N, NUM_WARPS, 0, GROUPS)
    scheduler = TileScheduler(tiles, work_words, by_id)
    fence_async_shared()  # TMA arrives at some of the barriers
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (epilogue, ring, exchange, tiles, sums, NUM_WARPS)),
                (produce, (operands, ring, exchange, scheduler)),
                (copy_local_shard, (x, local_rows, exchange, sizes, tiles, COPY_LOCAL, SCALED)),
            ],
            [1, 2],
            [40, 80 if COPY_LOCAL else 40],
        )
    else:
        # Three warp groups have 504 registers a thread: the first gets what these leave.
        beside = epilogue.stored_through(new_slices(y_desc, Y_BUFFERS))
        second, others = ring.of_group(1), sums.of_group(1)
        gl.warp_specialize(
            [
                (multiply, (epilogue, ring.of_group(0), exchange, tiles, sums, NUM_WARPS)),
                (multiply, (beside, second, exchange, tiles, others, NUM_WARPS)),
                (produce, (operands, ring, exchange, scheduler)),
                (copy_local_shard, (x, local_rows, exchange, sizes, tiles, COPY_LOCAL, SCALED)),
            ],
            [NUM_WARPS, 1, 2],
            [216 if COPY_LOCAL else 232, 40, 72 if COPY_LOCAL else 40],
        )


def _sizes(
    M_shard: int, N: int, K: int, world_size: int, device: torch.device, tile: Tile
) -> tuple[SplitK, tuple[int, ...]]:
    """What is split along K, and the numbers of a launch that follow from sizes."""
    tiles, k_tiles = tiles_of_shard(M_shard, N, tile) * world_size, cdiv(K, tile.block_k)
    sms = hopper_config.resident_ctas(device)
    split, row_limit = split_last_wave(tiles, k_tiles, sms, tile), NO_LIMIT
    if is_ragged(M_shard, world_size, tile):
        # two tiles make the same rows, whose sums must have one order
        split, row_limit = SplitK(tiles, sms), M_shard - tile.block_m
    return split, (
        M_shard, N, K, row_limit, *split.numbers(k_tiles), min(split.ctas, split.first_part),
    )  # fmt: skip


@lru_cache(maxsize=256)  # a call of new sizes would wait for dataclasses
def _compiled_for(
    world_size: int, layout: str, tile: Tile, has_bias: bool, copy_local: bool, k_parts: int,
    scaling: Scaling | None,
) -> tuple[Tile, AgConfig]:  # fmt: skip
    """What one partition multiplies by, and the constants."""
    groups = warp_groups(tile)
    partition = replace(tile, num_warps=tile.num_warps // groups)
    return partition, AgConfig(
        **common_config(world_size, layout, partition, scaling), BLOCK_N=tile.block_n,
        Y_BUFFERS=slice_buffers(tile, scaling.out_dtype if scaling else None),
        HAS_BIAS=has_bias, COPY_LOCAL=copy_local, K_PARTS=k_parts, GROUPS=groups,
        LEAD=lead(tile),
    )  # fmt: skip


def ag_gemm(
    x: Memory, gathered: Memory, w: Memory, bias: Memory | None, *,
    pad: Memory, status: Memory, partial_counters: Memory, work_words: Memory, rank: int,
    epoch: Number, timeout_ns: int, comm_rows: int, layout: str, tile: Tile, copy_local: bool,
    k_parts: int = 1, scaling: Scaling | None = None,
) -> Memory:  # fmt: skip
    """x [M_shard, K] and gathered [R * M_shard, K] times w ([N, K] or [K, N]) + bias [N].

    Gives y [R * M_shard, N]. `copy_local`: the kernel also copies x to the local shard of
    `gathered`. `k_parts`: the rows come in so many parts of K (`sizes.part_columns`), in place of
    communication tiles of `comm_rows` rows.
    """
    M, N = gathered.shape[0], w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(M, N, dtype=result_dtype(x, scaling))
    local_rows = gathered[rank * x.shape[0] :] if copy_local else gathered
    world_size = M // x.shape[0]
    partition, config = _compiled_for(
        world_size, layout, tile, bias is not None, copy_local, k_parts, scaling and scaling.kind
    )
    split, sizes = _sizes(x.shape[0], N, x.shape[1], world_size, x.device, tile)
    sums = split.partials * tile.block_m * tile.block_n
    described = descriptors.described
    launch_kernel(
        hopper_ag_gemm_kernel, (split.ctas,), partition,
        (
            described(x, tile.block_m, tile.block_k),
            described(gathered, tile.block_m, tile.block_k),
            descriptors.described_w(w, layout, tile.block_k, tile.block_n),
            described(y, tile.block_m // warp_groups(tile), SLICE_COLUMNS),
            bias if bias is not None else x, *scales_or(x, scaling), x, local_rows,
            partial_sums(x, sums, partial_counters), pad, status,
            partial_counters, work_words,
        ),
        (rank, epoch, timeout_ns, comm_rows, *sizes), CONFIG=config,
    )  # fmt: skip
    return y


def gemm(
    x: Tensor, w: Tensor, layout: str, tile: Tile = DEEP, scaling: Scaling | None = None
) -> Tensor:
    """x [M, K] times w ([N, K] or [K, N]), without any communication: the baseline of a tile."""
    words = _nothing(x.device)
    return ag_gemm(
        x, x, w, None, pad=words, status=words, partial_counters=words,
        work_words=words[PARTIAL_COUNTERS:], rank=0, epoch=0,
        timeout_ns=10**9, comm_rows=x.shape[0], layout=layout, tile=tile, copy_local=False,
        scaling=scaling,
    )  # fmt: skip


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
