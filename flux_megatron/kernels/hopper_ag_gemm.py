"""AG+GEMM for Hopper, in Gluon: the same protocol as `ag_gemm.py`, at the speed of a library GEMM.

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
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flux_megatron.kernels import hopper_config, hopper_descriptors
from flux_megatron.kernels.hopper_config import (
    DEEP,
    Config,
    column_parts,
    common_config,
    lead,
    slice_buffers,
    slice_columns,
    warp_groups,
)
from flux_megatron.kernels.hopper_gathered_rows import GatheredRows, copy_local_shard
from flux_megatron.kernels.hopper_ring import new_ring
from flux_megatron.kernels.hopper_roles import multiply, produce
from flux_megatron.kernels.hopper_scheduler import TileScheduler, new_exchange
from flux_megatron.kernels.hopper_signals import Signals
from flux_megatron.kernels.hopper_split_k import Partials, WorkTiles
from flux_megatron.kernels.hopper_stored_tiles import StoredTiles, new_slices
from flux_megatron.kernels.hopper_tile_order import Sizes
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.split_k import is_low, is_ragged, split_k_of_gather
from flux_megatron.kernels.triton_launch import Launcher, empty
from flux_megatron.problem import Tile
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS


@dataclass(frozen=True, kw_only=True)
class AgConfig(Config):
    BLOCK_N: int
    Y_BUFFERS: int
    HAS_BIAS: bool
    COPY_LOCAL: bool
    RAGGED: bool  # the rows of a shard are no multiple of a tile's
    K_PARTS: int  # in which the rows of other ranks come
    GROUPS: int  # partitions that multiply
    LEAD: int


# numbers that change from call to call must not compile a kernel each
@gluon.jit(
    do_not_specialize=[
        "rank", "epoch", "timeout_ns", "comm_rows", "work_tiles", "last_wave_first", "by_id"
    ]
)  # fmt: skip
def hopper_ag_gemm_kernel(
    x_desc, gathered_desc, w_desc, y_desc, w_rest, bias, x, local_rows, partials, pad,
    status, counters, work_words, rank, epoch, timeout_ns: gl.int64, comm_rows, M_shard, N,
    K, early_tiles, work_tiles, last_wave_first, by_id, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    Y_BUFFERS: gl.constexpr = CONFIG.Y_BUFFERS
    NUM_WARPS: gl.constexpr = CONFIG.NUM_WARPS
    GROUPS: gl.constexpr = CONFIG.GROUPS
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    COPY_LOCAL: gl.constexpr = CONFIG.COPY_LOCAL
    sizes = Sizes(rank, M_shard, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    tiles = WorkTiles(
        work_tiles, 0, early_tiles, last_wave_first,
        CONFIG.EARLY_PARTS, CONFIG.LAST_PARTS, CONFIG.NUM_CTAS,
    )  # fmt: skip
    signals = Signals(pad, status, epoch, timeout_ns)
    exchange = new_exchange(GROUPS + 1 if COPY_LOCAL else GROUPS)
    w_descs = (w_desc,)
    if w_rest is not None:
        w_descs = w_descs + (w_rest,)
    ring = new_ring(x_desc, w_descs, CONFIG.STAGES, CONFIG.LAYOUT_NN, GROUPS, CONFIG.LEAD)
    operands = GatheredRows(
        x_desc, gathered_desc, w_descs, sizes, signals, comm_rows, CONFIG.RAGGED, CONFIG.K_PARTS
    )
    epilogue = StoredTiles(
        y_desc, new_slices(y_desc, Y_BUFFERS), bias, sizes, signals, CONFIG.HAS_BIAS, NUM_WARPS
    )
    sums = Partials(partials, counters, CONFIG.PARTS_MAX, BLOCK_N, NUM_WARPS, 0, GROUPS)
    scheduler = TileScheduler(tiles, work_words, by_id)
    fence_async_shared()  # TMA arrives at some of the barriers
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (epilogue, ring, exchange, tiles, sums, NUM_WARPS)),
                (produce, (operands, ring, exchange, scheduler)),
                (copy_local_shard, (x, local_rows, exchange, sizes, tiles, COPY_LOCAL)),
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
                (copy_local_shard, (x, local_rows, exchange, sizes, tiles, COPY_LOCAL)),
            ],
            [NUM_WARPS, 1, 2],
            [208 if COPY_LOCAL else 232, 40, 80 if COPY_LOCAL else 40],
        )


@lru_cache(maxsize=1024)
def _launcher(
    x: torch.Size, N: int, world_size: int, dtype: torch.dtype, device: torch.device,
    bias: bool, layout: str, tile: Tile, split_k_shards: int, copy_local: bool, k_parts: int = 1,
    recorded: bool = False,
) -> tuple[Launcher, int, tuple[int, int], int, int | None]:  # fmt: skip
    """The launch, how many numbers partial sums are, the rows and columns of a slice of a tile, the
    columns of its parts.
    """
    M_shard, K = x
    ragged = is_ragged(M_shard, world_size, tile)
    split = split_k_of_gather(
        tiles_of_shard(M_shard, N, tile), world_size, split_k_shards, cdiv(K, tile.block_k),
        hopper_config.sms(device), ragged, is_low(tile),
    )  # fmt: skip
    groups = warp_groups(tile)
    partition = replace(tile, num_warps=tile.num_warps // groups)
    run = Launcher(
        hopper_ag_gemm_kernel, (split.ctas,), partition,
        (
            M_shard, N, K, split.early, split.work_tiles, split.last_wave_first,
            min(split.ctas, split.whole),
        ),
        CONFIG=AgConfig(
            **common_config(world_size, layout, partition, split), BLOCK_N=tile.block_n,
            Y_BUFFERS=slice_buffers(tile), HAS_BIAS=bias, COPY_LOCAL=copy_local, RAGGED=ragged,
            K_PARTS=k_parts, GROUPS=groups, LEAD=lead(tile),
        ),
    )  # fmt: skip
    sums = split.partials * tile.block_m * tile.block_n
    in_slice = (tile.block_m // groups, slice_columns(tile))
    return run, sums, in_slice, *column_parts(tile.block_n)


def ag_gemm(
    x: Tensor, gathered: Tensor, w: Tensor, bias: Tensor | None, *,
    pad: Tensor, status: Tensor, partial_counters: Tensor, work_words: Tensor, rank: int,
    epoch: int, timeout_ns: int, comm_rows: int, layout: str, tile: Tile, split_k_shards: int,
    copy_local: bool, k_parts: int = 1,
) -> Tensor:  # fmt: skip
    """x [M_shard, K] and gathered [R * M_shard, K] times w ([N, K] or [K, N]) + bias [N].

    Gives y [R * M_shard, N]. `copy_local`: the kernel also copies x to the local shard of
    `gathered`. `split_k_shards`: how many shards' tiles are split along K, if a shard has fewer
    than there are SMs. `k_parts`: the rows come in so many parts of K (`sizes.part_columns`), in
    place of communication tiles of `comm_rows` rows.
    """
    M, N = gathered.shape[0], w.shape[0] if layout == "nt" else w.shape[1]
    y = empty(x, M, N)
    local_rows = gathered[rank * x.shape[0] :] if copy_local else gathered
    run, sums, in_slice, columns, rest = _launcher(
        x.shape, N, M // x.shape[0], x.dtype, x.device, bias is not None, layout, tile,
        split_k_shards, copy_local, k_parts,
    )  # fmt: skip
    described = hopper_descriptors.described
    run(
        (
            described(x, tile.block_m, tile.block_k),
            described(gathered, tile.block_m, tile.block_k),
            hopper_descriptors.described_w(w, layout, tile.block_k, columns),
            described(y, *in_slice),
            rest and hopper_descriptors.described_w(w, layout, tile.block_k, rest),
            bias if bias is not None else x, x, local_rows,
            empty(x, sums, dtype=torch.float32) if sums else x, pad, status,
            partial_counters, work_words,
        ),
        (rank, epoch, timeout_ns, comm_rows),
    )  # fmt: skip
    return y


def gemm(x: Tensor, w: Tensor, layout: str, tile: Tile = DEEP) -> Tensor:
    """x [M, K] times w ([N, K] or [K, N]), without any communication: the baseline of a tile."""
    words = _nothing(x.device)
    return ag_gemm(
        x, x, w, None, pad=words, status=words, partial_counters=words,
        work_words=words[PARTIAL_COUNTERS:], rank=0, epoch=0,
        timeout_ns=10**9, comm_rows=x.shape[0], layout=layout, tile=tile, split_k_shards=0,
        copy_local=False,
    )  # fmt: skip


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
