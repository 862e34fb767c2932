"""GEMM+RS for Hopper, in Gluon: other shards' tiles are sent on, own ones add what has come.

    this kernel  takes the tiles of rank+1, rank+2, ... first, of the own shard last. A tile of
                 another shard goes to its owner's slot `rank`, one of two ways:
      copy engine  the tile is stored in `parts` and counted [D]; the copy engine waits [D] for all
                   tiles of a communication tile, pushes it and signals [B]: for large problems
      SMs          the tile is stored in the slot over NVLink and counted [C]; the last of a
                   communication tile signals [B]: for small ones, where latency is all
    this kernel  in the tiles of the own shard: waits [B], fetches the other ranks' tiles while it
                 multiplies, adds them in fp32, rounds once and stores y

`parts` and slots hold whole tiles in the order in which they are made, so that a communication
tile is contiguous whatever the order of tiles, and rows beyond the shard need no care. The sum is
in fp32 and its order fixed: own product, then rank-1, rank-2, ..., the last to arrive.
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
    barrier,
    complete_tma_stores,
    count_acq_rel_gpu,
    count_release_sys,
    end_draw,
    here,
    signal_release_sys,
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
    number_in_groups,
    tile_in_groups,
)


@gluon.jit
def rs_tile(tile, rank, tiles_shard, tiles_n, WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr):
    """Owner rank, row and column in its shard, number in its shard, and steps from here to it.

    Groups of rows span the shards of other ranks, so that small shards share what they read of w.
    """
    others = tiles_shard * (WORLD_SIZE - 1)
    group_m = min(GROUP_M, tiles_shard)
    if tile < others * tiles_n:
        m, n = tile_in_groups(tile, others, tiles_n, GROUP_M)
    else:
        m, n = tile_in_groups(tile - others * tiles_n, tiles_shard, tiles_n, group_m)
        m += others
    step = m // tiles_shard
    m = m % tiles_shard
    number = number_in_groups(m, n, tiles_shard, tiles_n, group_m)
    return (rank + 1 + step) % WORLD_SIZE, m, n, number, step


@gluon.jit
def rs_loader(
    x_desc, w_desc, x_bufs, w_bufs, ready, free, item_buf, item_full, item_empty, work_counter,
    rank, M_shard, N, K, cut_first, cut_last, works, split_first, by_id, BN: gl.constexpr,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr,
    LAYOUT_NN: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp: draws this CTA's items and loads the operands of their tiles."""
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    tiles_shard = gl.cdiv(here(M_shard), BM)
    tiles_n = gl.cdiv(here(N), BN)
    steps = gl.cdiv(here(K), BK)
    loaded = 0
    phase = 0
    item = first_item(work_counter, by_id)
    while item < works:
        phase = hand_out(item, item_buf, item_full, item_empty, phase)
        tile, first, last, _, _, _ = tile_of_work(
            item, steps, cut_first, cut_last, split_first, CUT, SPLIT
        )
        owner, m, n, _, _ = rs_tile(tile, rank, tiles_shard, tiles_n, WORLD_SIZE, GROUP_M)
        loaded, ticket = load_tile(
            x_desc, w_desc, owner * M_shard + m * BM, n * BN, first, last, x_bufs, w_bufs,
            ready, free, loaded, work_counter, LAYOUT_NN,
        )  # fmt: skip
        item = settle(end_draw(ticket), work_counter, by_id)
    hand_out(item, item_buf, item_full, item_empty, phase)
    close_draws(item, works, work_counter, by_id, NUM_PROGRAMS)


@gluon.jit
def store_at_owner(slots_desc, pointer, place, y_buf, places):
    """Begin to store the tile in `y_buf` at `place` of the slots at `pointer`, another rank's."""
    BM: gl.constexpr = slots_desc.block_type.shape[0]
    BN: gl.constexpr = slots_desc.block_type.shape[1]
    theirs = tma.make_tensor_descriptor(
        pointer.to(gl.pointer_type(slots_desc.dtype)), [places * BM, BN], [BN, 1], [BM, BN],
        slots_desc.layout,
    )  # fmt: skip
    tma.async_copy_shared_to_global(theirs, [place * BM, 0], y_buf)


@gluon.jit
def rs_mover(
    parts_desc, slots_desc, y_desc, slot_pointers, pad_pointers, y_buf, y_full, y_free, part_ready,
    part_added, item_buf, item_full, item_empty, pad, status, waits, counters, rank, epoch,
    timeout_ns, tiles_comm, M_shard, N, cut_first, cut_last, works, split_first,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr,
    BY_SM: gl.constexpr,
):  # fmt: skip
    """One warp: fetches into `y_buf` what the other ranks have made of an own tile, one rank after
    another, and stores each finished tile from it.
    """
    BM: gl.constexpr = y_desc.block_type.shape[0]
    BN: gl.constexpr = y_desc.block_type.shape[1]
    deadline = time_ns() + timeout_ns
    tiles_shard = gl.cdiv(here(M_shard), BM)
    tiles_n = gl.cdiv(here(N), BN)
    per_shard = tiles_shard * tiles_n
    comm_tiles = gl.cdiv(per_shard, tiles_comm)
    arrived = (epoch * 0).to(gl.int64)  # one bit for each (source, communication tile)
    finished = 0
    fetched = 0
    item, phase = take_item(item_buf, item_full, item_empty, 0, 1)
    while item < works:
        tile, _, _, cut_part, _, _ = tile_of_work(
            item, 1, cut_first, cut_last, split_first, CUT, SPLIT
        )
        if cut_part == 0:  # else another program has the tile
            owner, m, n, place, step = rs_tile(
                tile, rank, tiles_shard, tiles_n, WORLD_SIZE, GROUP_M
            )
            comm_tile = place // tiles_comm
            if owner == rank:
                for part in range(1, WORLD_SIZE):
                    source = (rank + WORLD_SIZE - part) % WORLD_SIZE
                    bit = (epoch * 0 + 1).to(gl.int64) << (source * comm_tiles + comm_tile)
                    if arrived & bit == 0:
                        slot = source * MAX_COMM_TILES + comm_tile
                        begin_ns = wait_begins(waits)
                        wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [B]
                        wait_ends(waits, begin_ns, tile, source)
                        arrived = arrived | bit
                    mbarrier.expect(part_ready, slots_desc.block_type.nbytes)
                    row = (source * per_shard + place) * BM
                    tma.async_copy_global_to_shared(slots_desc, [row, 0], part_ready, y_buf)
                    mbarrier.wait(part_added, fetched & 1)
                    fetched += 1
            mbarrier.wait(y_full, finished & 1)
            finished += 1
            if owner == rank:
                tma.async_copy_shared_to_global(y_desc, [m * BM, n * BN], y_buf)
                tma.store_wait(pendings=0)
            elif BY_SM:
                store_at_owner(
                    slots_desc, gl.load(slot_pointers + owner), rank * per_shard + place, y_buf,
                    WORLD_SIZE * per_shard,
                )  # fmt: skip
                complete_tma_stores()
                arrivals = min(tiles_comm, per_shard - comm_tile * tiles_comm)
                if count_acq_rel_gpu(counters + owner * MAX_COMM_TILES + comm_tile, arrivals):
                    theirs = gl.load(pad_pointers + owner).to(pad.dtype)
                    signal_release_sys(
                        theirs, rank * MAX_COMM_TILES + comm_tile, epoch
                    )  # signal [B]
            else:
                row = (step * per_shard + place) * BM
                tma.async_copy_shared_to_global(parts_desc, [row, 0], y_buf)
                complete_tma_stores()
                count_release_sys(counters + owner * MAX_COMM_TILES + comm_tile)  # signal [D]
            mbarrier.arrive(y_free, count=1)
        item, phase = take_item(item_buf, item_full, item_empty, phase, 1)


@gluon.jit
def add_part(out, y_buf, part_ready, part_added, fetched, layout: gl.constexpr):
    """out + the tile that has been fetched, which is number `fetched` of this program."""
    mbarrier.wait(part_ready, fetched & 1)
    out += y_buf.load(layout).to(gl.float32)
    fence_async_shared()  # TMA writes there next
    barrier()  # every thread has its share
    mbarrier.arrive(part_added, count=1)
    return out


@gluon.jit
def rs_multiplier(
    y_desc, partials, joined, status, x_bufs, w_bufs, y_buf, ready, free, y_full, y_free,
    part_ready, part_added, item_buf, item_full, item_empty, rank, timeout_ns, M_shard, N, K,
    cut_first, cut_last, works, split_first, WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr,
    CUT: gl.constexpr, SPLIT: gl.constexpr, LAYOUT_NN: gl.constexpr, LATE: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Two warp groups: multiply, and add the other ranks' tiles to own ones."""
    BM: gl.constexpr = y_desc.block_type.shape[0]
    BN: gl.constexpr = y_desc.block_type.shape[1]
    BK: gl.constexpr = x_bufs.shape[2]
    dtype: gl.constexpr = y_desc.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BN, 16]
    )
    tiles_shard = gl.cdiv(M_shard, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    multiplied = 0
    fetched = 0
    finished = 0
    deadline = time_ns() + timeout_ns
    parts_max: gl.constexpr = CUT if CUT > SPLIT else SPLIT
    item, phase = take_item(item_buf, item_full, item_empty, 0, NUM_WARPS)
    while item < works:
        tile, done, last, cut_part, cut_parts, cut = tile_of_work(
            item, steps, cut_first, cut_last, split_first, CUT, SPLIT
        )
        owner, _, _, _, _ = rs_tile(tile, rank, tiles_shard, tiles_n, WORLD_SIZE, GROUP_M)
        # An own tile is made in R - 1 parts of K: during each another rank's tile is fetched. But
        # where nothing follows, nothing is worth a wait before the last product.
        late = LATE or last - done < steps
        parts = 1
        if owner == rank and not late:
            parts = WORLD_SIZE - 1
        out = gl.zeros((BM, BN), gl.float32, acc_layout)
        for part in range(parts):
            until = done + (last - done) // (parts - part)
            acc = warpgroup_mma_init(out)
            for step in range(done, until):
                acc = multiply_step(
                    acc, x_bufs, w_bufs, ready, free, multiplied, step == done, LAYOUT_NN
                )
                multiplied += 1
            out = finish_products(acc, free, multiplied)
            done = until
            if owner == rank and not late:
                out = add_part(out, y_buf, part_ready, part_added, fetched, acc_layout)
                fetched += 1
        mine = True
        if parts_max > 1:
            mine = cut_part == 0
            if not mine:
                leave_part(out, partials, joined, cut, cut_part, parts_max, acc_layout)
            elif cut_parts > 1:
                out = join_parts(
                    out, partials, joined, cut, cut_parts, deadline, status, parts_max, acc_layout
                )
        if mine:
            if owner == rank and late:
                for _ in range(WORLD_SIZE - 1):
                    out = add_part(out, y_buf, part_ready, part_added, fetched, acc_layout)
                    fetched += 1
            mbarrier.wait(y_free, (finished & 1) ^ 1)
            y_buf.store(out.to(dtype))
            fence_async_shared()
            mbarrier.arrive(y_full, count=1)
            finished += 1
        item, phase = take_item(item_buf, item_full, item_empty, phase, NUM_WARPS)


# numbers that change from call to call must not compile a kernel each
@gluon.jit(
    do_not_specialize=["rank", "epoch", "timeout_ns", "tiles_comm", "works", "split_first", "by_id"]
)
def hopper_gemm_rs_kernel(
    x_desc, w_desc, parts_desc, slots_desc, y_desc, partials, slot_pointers, pad_pointers, pad,
    status, waits, counters, joined, work_counter, rank, epoch, timeout_ns: gl.int64, tiles_comm,
    M_shard, N, K, cut_first, cut_last, works, split_first, by_id,
    WORLD_SIZE: gl.constexpr, GROUP_M: gl.constexpr, CUT: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, LAYOUT_NN: gl.constexpr,
    BY_SM: gl.constexpr, LATE: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = y_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    y_buf = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    y_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    part_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    part_added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_buf, item_full, item_empty = item_exchange(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(y_full, count=1)
    mbarrier.init(y_free, count=1)
    mbarrier.init(part_ready, count=1)
    mbarrier.init(part_added, count=1)
    fence_async_shared()  # TMA arrives at some of them
    gl.warp_specialize(
        [
            (rs_multiplier, (
                y_desc, partials, joined, status, x_bufs, w_bufs, y_buf, ready, free, y_full,
                y_free, part_ready, part_added, item_buf, item_full, item_empty, rank, timeout_ns,
                M_shard, N, K, cut_first, cut_last, works, split_first,
                WORLD_SIZE, GROUP_M, CUT, SPLIT, LAYOUT_NN, LATE, NUM_WARPS,
            )),
            (rs_loader, (
                x_desc, w_desc, x_bufs, w_bufs, ready, free, item_buf, item_full, item_empty,
                work_counter, rank, M_shard, N, K, cut_first, cut_last, works, split_first,
                by_id, BN,
                WORLD_SIZE, GROUP_M, CUT, SPLIT, LAYOUT_NN, NUM_PROGRAMS,
            )),
            (rs_mover, (
                parts_desc, slots_desc, y_desc, slot_pointers, pad_pointers, y_buf, y_full, y_free,
                part_ready, part_added, item_buf, item_full, item_empty, pad, status, waits,
                counters, rank, epoch, timeout_ns, tiles_comm, M_shard, N, cut_first, cut_last,
                works, split_first,
                WORLD_SIZE, GROUP_M, CUT, SPLIT, BY_SM,
            )),
        ],
        [1, 1],
        [40, 40 if waits is None else 48],  # with 40 the recording one spills 40 bytes
    )  # fmt: skip
