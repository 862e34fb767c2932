"""AG+GEMM for Hopper, in Gluon: the same protocol as `ag_gemm.py`, at the speed of a library GEMM.

    copy engine  pushes x of rank s into gathered[s] of every rank, then signals [A]
    this kernel  takes the tiles of the own shard first, read from x itself, then those of
                 rank+1, rank+2, ...: waits [A] before the first load of a tile's rows

A program remembers what it has seen arrive, so it asks once for each communication tile, not once
for each of its tiles. With one rank this is a plain GEMM.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
)

from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    end_draw,
    here,
    time_ns,
    wait_acquire_sys,
    wait_begins,
    wait_ends,
)
from flux_megatron.kernels.hopper_scheduler import (
    close_draws,
    first_item,
    hand_out,
    item_exchange,
    settle,
    take_item,
    tile_of_work,
)
from flux_megatron.kernels.hopper_tile import (
    finish_products,
    join_parts,
    leave_part,
    load_tile,
    multiply_step,
    tile_in_groups,
)


@gluon.jit
def ag_tile(
    tile, rank, tiles_shard, tiles_n, cut_tiles,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Source rank, and row and column in its shard.

    Own tiles first. Groups of rows span the shards of the other ranks, so that small shards share
    what they read of w. But where a shard is few tiles, programs that find no own tile go on with
    columns of rank+1, which arrives first, alone; unless tiles are cut, so that all find one.
    """
    own = tiles_shard * tiles_n
    head = 0  # columns of rank+1
    if WORLD_SIZE > 1:
        if tiles_shard <= 2 and cut_tiles == 0:
            lacking = gl.cdiv(own, NUM_PROGRAMS) * NUM_PROGRAMS - own
            head = min(gl.cdiv(lacking, tiles_shard), tiles_n)
    behind = tiles_shard * (WORLD_SIZE - 2)  # rows of the others in these columns
    place = tile - own
    if place < 0:
        m, n = tile_in_groups(tile, tiles_shard, tiles_n, GROUP_M)
    elif place < head * tiles_shard:
        m = tiles_shard + place % tiles_shard
        n = place // tiles_shard
    elif place < head * (tiles_shard + behind):
        place -= head * tiles_shard
        m = 2 * tiles_shard + place % behind
        n = place // behind
    else:
        place -= head * (tiles_shard + behind)
        m, n = tile_in_groups(place, tiles_shard + behind, tiles_n - head, GROUP_M)
        m += tiles_shard
        n += head
    return (rank + m // tiles_shard) % WORLD_SIZE, m % tiles_shard, n


@gluon.jit
def ag_loader(
    x_desc, gathered_desc, w_desc, x_bufs, w_bufs, ready, free, item_buf, item_full, item_empty,
    work_counter, pad, status, waits, rank, epoch, timeout_ns, comm_rows, M_shard, N, K,
    cut_tiles, works, split_first, by_id, BN: gl.constexpr, WORLD_SIZE: gl.constexpr,
    GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr, LAYOUT_NN: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp: draws this CTA's items and loads the operands of their tiles."""
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    deadline = time_ns() + timeout_ns
    tiles_shard = gl.cdiv(here(M_shard), BM)
    tiles_n = gl.cdiv(here(N), BN)
    steps = gl.cdiv(here(K), BK)
    comm_tiles = gl.cdiv(M_shard, comm_rows)
    arrived = (epoch * 0).to(gl.int64)  # one bit for each (source, communication tile)
    loaded = 0
    phase = 0
    item = first_item(work_counter, by_id)
    while item < works:
        phase = hand_out(item, item_buf, item_full, item_empty, phase)
        tile, first, last, _, _, _ = tile_of_work(
            item, steps, 0, cut_tiles, split_first, CUT, SPLIT
        )
        source, m, n = ag_tile(
            tile, rank, tiles_shard, tiles_n, cut_tiles, WORLD_SIZE, GROUP_M, NUM_PROGRAMS
        )
        if source == rank:
            loaded, ticket = load_tile(
                x_desc, w_desc, m * BM, n * BN, first, last, x_bufs, w_bufs, ready, free, loaded,
                work_counter, LAYOUT_NN,
            )  # fmt: skip
        else:
            # communication tiles of one source arrive in their order: the last one tells for all
            comm_tile = (min((m + 1) * BM, M_shard) - 1) // comm_rows
            bit = (epoch * 0 + 1).to(gl.int64) << (source * comm_tiles + comm_tile)
            if arrived & bit == 0:
                slot = source * MAX_COMM_TILES + comm_tile
                begin_ns = wait_begins(waits)
                wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [A]
                wait_ends(waits, begin_ns, tile, source)
                arrived = arrived | bit
            loaded, ticket = load_tile(
                gathered_desc, w_desc, source * M_shard + m * BM, n * BN, first, last,
                x_bufs, w_bufs, ready, free, loaded, work_counter, LAYOUT_NN,
            )  # fmt: skip
        item = settle(end_draw(ticket), work_counter, by_id)
    hand_out(item, item_buf, item_full, item_empty, phase)
    close_draws(item, works, work_counter, by_id, NUM_PROGRAMS)


@gluon.jit
def ag_copier(
    x, own_rows, item_buf, item_full, item_empty, M_shard, K, works, COPY_OWN: gl.constexpr
):
    """Two warps: with each item a share of x to the local shard of the gathered rows, if wanted."""
    BLOCK: gl.constexpr = 64 * 8 * 8  # 8 loads of 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [2], [0])
    if COPY_OWN:
        size = M_shard.to(gl.int64) * K
        blocks = gl.cdiv(size, BLOCK).to(gl.int32)
        item, phase = take_item(item_buf, item_full, item_empty, 0, 2)
        while item < works:
            for block in range(item, blocks, works):
                offsets = block.to(gl.int64) * BLOCK + gl.arange(0, BLOCK, layout)
                inside = offsets < size
                gl.store(own_rows + offsets, gl.load(x + offsets, mask=inside), mask=inside)
            item, phase = take_item(item_buf, item_full, item_empty, phase, 2)


@gluon.jit
def ag_multiplier(
    y_desc, bias, partials, counters, status, x_bufs, w_bufs, ready, free, item_buf, item_full,
    item_empty, rank, timeout_ns, M_shard, N, K, cut_tiles, works, split_first,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr,
    LAYOUT_NN: gl.constexpr, HAS_BIAS: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Two warp groups: multiply, add the bias, store."""
    BM: gl.constexpr = y_desc.block_type.shape[0]
    BN: gl.constexpr = y_desc.block_type.shape[1]
    BK: gl.constexpr = x_bufs.shape[2]
    dtype: gl.constexpr = y_desc.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BN, 16]
    )
    y_buf = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
    tiles_shard = gl.cdiv(M_shard, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    deadline = time_ns() + timeout_ns
    multiplied = 0
    parts_max: gl.constexpr = CUT if CUT > SPLIT else SPLIT
    item, phase = take_item(item_buf, item_full, item_empty, 0, NUM_WARPS)
    while item < works:
        tile, first, last, part, parts, cut = tile_of_work(
            item, steps, 0, cut_tiles, split_first, CUT, SPLIT
        )
        acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, acc_layout))
        for step in range(first, last):
            acc = multiply_step(
                acc, x_bufs, w_bufs, ready, free, multiplied, step == first, LAYOUT_NN
            )
            multiplied += 1
        out = finish_products(acc, free, multiplied)
        mine = True
        if parts_max > 1:
            mine = part == 0
            if not mine:
                leave_part(out, partials, counters, cut, part, parts_max, acc_layout)
            elif last < steps:
                out = join_parts(
                    out, partials, counters, cut, parts, deadline, status, parts_max, acc_layout
                )
        if mine:
            source, m, n = ag_tile(
                tile, rank, tiles_shard, tiles_n, cut_tiles, WORLD_SIZE, GROUP_M, NUM_PROGRAMS
            )
            if HAS_BIAS:
                cols = n * BN + gl.arange(0, BN, gl.SliceLayout(0, acc_layout))
                out += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            tma.store_wait(pendings=0)
            y_buf.store(out.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [source * M_shard + m * BM, n * BN], y_buf)
        item, phase = take_item(item_buf, item_full, item_empty, phase, NUM_WARPS)
    tma.store_wait(pendings=0)


# numbers that change from call to call must not compile a kernel each
@gluon.jit(
    do_not_specialize=["rank", "epoch", "timeout_ns", "comm_rows", "works", "split_first", "by_id"]
)
def hopper_ag_gemm_kernel(
    x_desc, gathered_desc, w_desc, y_desc, bias, x, own_rows, partials, pad, status, waits,
    counters, work_counter, rank, epoch, timeout_ns: gl.int64, comm_rows, M_shard, N, K, cut_tiles,
    works, split_first, by_id,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, LAYOUT_NN: gl.constexpr,
    HAS_BIAS: gl.constexpr, COPY_OWN: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = y_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_buf, item_full, item_empty = item_exchange(2 if COPY_OWN else 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()  # TMA arrives at some of them
    gl.warp_specialize(
        [
            (ag_multiplier, (
                y_desc, bias, partials, counters, status, x_bufs, w_bufs, ready, free, item_buf,
                item_full, item_empty, rank, timeout_ns, M_shard, N, K, cut_tiles, works,
                split_first,
                WORLD_SIZE, GROUP_M, CUT, SPLIT, LAYOUT_NN, HAS_BIAS, NUM_PROGRAMS, NUM_WARPS,
            )),
            (ag_loader, (
                x_desc, gathered_desc, w_desc, x_bufs, w_bufs, ready, free, item_buf, item_full,
                item_empty, work_counter, pad, status, waits, rank, epoch, timeout_ns, comm_rows,
                M_shard, N, K, cut_tiles, works, split_first, by_id, BN,
                WORLD_SIZE, GROUP_M, CUT, SPLIT, LAYOUT_NN, NUM_PROGRAMS,
            )),
            (ag_copier, (
                x, own_rows, item_buf, item_full, item_empty, M_shard, K, works, COPY_OWN,
            )),
        ],
        [1, 2],
        [40, 80],
    )  # fmt: skip
