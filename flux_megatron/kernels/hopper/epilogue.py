"""The third role of GEMM+RS, one warp: it stores each finished tile where it belongs, and fetches
what other ranks have made of a local tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flux_megatron.kernels.gluon_versions import (
    Descriptor,
    Number,
    Pointer,
    Shared,
    aggregate,
    barrier,
    reinterpret,
    tma_load,
    tma_store,
)
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    complete_tma_stores,
    count_acq_rel_gpu,
    count_release_sys,
    here,
    signal_release_sys,
)


@aggregate
class StagingTile:
    """A tile in shared memory between the MMA warps and the store warp, in both directions:
    finished (`full`, `empty`), and fetched from another rank (`fetched`, `added`). `wire` is the
    same memory, as tiles travel: in the dtype of the result, or in e4m3 with a scale a tile. In
    `scales` are those of the finished and of the fetched tile.
    """

    tile: Shared
    wire: Shared
    scales: Shared
    full: Shared
    empty: Shared
    fetched: Shared
    added: Shared
    SCALED: gl.constexpr
    NUM_WARPS: gl.constexpr  # of the MMA warps

    @gluon.jit
    def hand_over(self, out, number):
        """Hand tile number `number` of this CTA over, when the one before has been stored; `out`
        may be its first rows alone.
        """
        mbarrier.wait(self.empty, (number & 1) ^ 1)
        if out.shape[0] < self.tile.shape[0]:
            self.tile.slice(0, out.shape[0]).store(out.to(self.tile.dtype))
        else:
            self.tile.store(out.to(self.tile.dtype))
        fence_async_shared()
        mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def hand_over_scaled(self, out, number, local):
        """`hand_over`, but in e4m3 if another rank adds the tile up."""
        if local:
            self.hand_over(out, number)
        else:
            scale, inverse = e4m3_scale(out)
            mbarrier.wait(self.empty, (number & 1) ^ 1)
            self.wire.store((out * inverse).to(self.wire.dtype))
            self.write_scale(0, scale, self.NUM_WARPS)
            fence_async_shared()
            mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def write_scale(self, which: gl.constexpr, scale, NUM_WARPS: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        self.scales.index(which).store(gl.full([1], scale, gl.float32, layout))

    @gluon.jit
    def read_scale(self, which: gl.constexpr, NUM_WARPS: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        return gl.max(self.scales.index(which).load(layout), 0)

    @gluon.jit
    def add_fetched(self, out, number, LAYOUT: gl.constexpr):
        """out + the fetched tile, which is number `number` of this CTA."""
        mbarrier.wait(self.fetched, number & 1)
        fetched = self.wire.load(LAYOUT).to(gl.float32)
        if self.SCALED:
            fetched *= self.read_scale(1, self.NUM_WARPS)
        out += fetched
        fence_async_shared()  # TMA writes there next
        barrier()  # every thread has its share
        mbarrier.arrive(self.added, count=1)
        return out


@gluon.jit
def e4m3_scale(out):
    """A power of two that brings the largest of a tile to 128 or more, below 256 of e4m3's 448; and
    its inverse. What is not finite stays so.
    """
    largest = gl.max(gl.max(gl.abs(out), 1), 0)
    exponent = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - 7, 1)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return scale, inverse


@gluon.jit
def new_staging_tile(y_desc, outgoing_desc, NUM_WARPS: gl.constexpr):
    tile = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    SCALED: gl.constexpr = outgoing_desc.dtype != y_desc.dtype
    wire = tile
    if SCALED:
        wire = reinterpret(tile, outgoing_desc.dtype, tile.shape, outgoing_desc.layout)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [2, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    fetched = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    mbarrier.init(fetched, count=1)
    mbarrier.init(added, count=1)
    return StagingTile(tile, wire, scales, full, empty, fetched, added, SCALED, NUM_WARPS)


@gluon.jit
def store_in_slices(matrix, rows, columns, row, col, tile, desc):
    """Store a tile in a peer's matrix [rows, columns], and wait until it is there. `desc` is one of
    such tiles.

    One slice of 128 bytes of each row after the other: what an SM has under way over NVLink holds
    up its own loads. With whole tiles at a time GEMM+AR 8192 x 5120 x 4096 takes 593 us, with
    slices 546 (2 x H200, 2026-11-27, h200x2/trees.jsonl).
    """
    BLOCK_M: gl.constexpr = desc.block_type.shape[0]
    ROW_BYTES: gl.constexpr = desc.block_type.nbytes // BLOCK_M
    SLICES: gl.constexpr = ROW_BYTES // desc.layout.swizzle_byte_width
    COLUMNS: gl.constexpr = desc.block_type.shape[1] // SLICES
    theirs = tma.make_tensor_descriptor(
        matrix, [rows, columns], [columns, 1], [BLOCK_M, COLUMNS], desc.layout
    )
    slices = reinterpret(tile, desc.dtype, [SLICES, BLOCK_M, COLUMNS], desc.layout)
    for i in range(SLICES):
        tma_store(theirs, [row, col + i * COLUMNS], slices.index(i))
        complete_tma_stores()


@aggregate
class TileTargets:
    """Where tiles go: y, the receive buffer of every rank, or `outgoing`, which the copy engine
    pushes; and the counters of tiles by communication tile, of `tiles_comm` tiles each. A tile
    takes `ROWS` rows in the last two: in the one behind those of an e4m3 tile is its scale.
    """

    outgoing: Pointer
    outgoing_desc: Descriptor
    received_desc: Descriptor
    y_desc: Descriptor
    received_pointers: Pointer
    pad_pointers: Pointer
    counters: Pointer
    tiles_comm: Number
    BY_SM: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def fetch(self, place, staging, fetched, sizes):
        """Fetch the tile at `place` of the receive buffer, and wait until it has been added."""
        if staging.SCALED:
            received = self.receive_buffer(here(sizes.rank))
            staging.write_scale(1, gl.load(self.scale_at(received, place)), 1)
        mbarrier.expect(staging.fetched, self.received_desc.block_type.nbytes)
        tma_load(self.received_desc, [place * self.ROWS, 0], staging.fetched, staging.wire)
        mbarrier.wait(staging.added, fetched & 1)

    @gluon.jit
    def receive_buffer(self, rank):
        pointer = gl.load(self.received_pointers + rank)
        return pointer.to(gl.pointer_type(self.received_desc.dtype))

    @gluon.jit
    def scale_at(self, tiles, place):
        """Where the scale of the tile at `place` is."""
        BLOCK_M: gl.constexpr = self.received_desc.block_type.shape[0]
        BLOCK_N: gl.constexpr = self.received_desc.block_type.shape[1]
        row = place.to(gl.int64) * self.ROWS + BLOCK_M
        return (tiles + row * BLOCK_N).to(gl.pointer_type(gl.float32))

    @gluon.jit
    def store_at_owner(self, owner, place, staging, places):
        """Store a tile at `place` of the `places` in the owner's receive buffer."""
        BLOCK_N: gl.constexpr = self.received_desc.block_type.shape[1]
        received = self.receive_buffer(owner)
        if staging.SCALED:
            gl.store(self.scale_at(received, place), staging.read_scale(0, 1))
        row = place * self.ROWS
        store_in_slices(
            received, places * self.ROWS, BLOCK_N, row, 0, staging.wire, self.received_desc
        )

    @gluon.jit
    def send(self, owner, hops, number, per_shard, staging, sizes, signals):
        """A finished tile of a remote shard, number `number` of the `per_shard` there."""
        comm_tile = number // self.tiles_comm
        counter = self.counters + owner * MAX_COMM_TILES + comm_tile
        if self.BY_SM:
            place = sizes.rank * per_shard + number
            self.store_at_owner(owner, place, staging, sizes.WORLD_SIZE * per_shard)
            arrivals = min(self.tiles_comm, per_shard - comm_tile * self.tiles_comm)
            if count_acq_rel_gpu(counter, arrivals):
                theirs = gl.load(self.pad_pointers + owner).to(signals.pad.dtype)
                slot = sizes.rank * MAX_COMM_TILES + comm_tile
                signal_release_sys(theirs, slot, signals.epoch)  # signal [B]
        else:
            place = hops * per_shard + number
            tma_store(self.outgoing_desc, [place * self.ROWS, 0], staging.wire)
            if staging.SCALED:
                gl.store(self.scale_at(self.outgoing, place), staging.read_scale(0, 1))
            complete_tma_stores()
            count_release_sys(counter)  # signal [D]

    @gluon.jit
    def finish(self, m, n, number, per_shard, tile, sizes):
        """A finished tile of the local shard."""
        tma_store(self.y_desc, [m * sizes.BLOCK_M, n * sizes.BLOCK_N], tile)
        tma.store_wait(pendings=0)

    @gluon.jit
    def collect(self, staging, fetched, grid, sizes):
        """Behind the last work tile."""
        pass


@gluon.jit
def move_tiles(targets, staging, exchange, tiles, order, sizes, signals):
    """One warp: fetches what the other ranks have made of a local tile, one rank after another, and
    stores each finished tile.
    """
    grid = sizes.grid_here()
    deadline = signals.deadline()
    per_shard = grid.rows * grid.columns
    comm_tiles = gl.cdiv(per_shard, targets.tiles_comm)
    arrived = signals.none_arrived()
    finished = 0
    fetched = 0
    place, phase = exchange.take(0, 1)
    while place < tiles.count:
        work = tiles.locate(place, 1)
        if work.part == 0:  # else another CTA has the tile
            owner, m, n, number, hops = order.locate(work.tile, grid)
            if owner == sizes.rank:
                for back in range(1, sizes.WORLD_SIZE):
                    source = (here(sizes.rank) + sizes.WORLD_SIZE - back) % sizes.WORLD_SIZE
                    comm_tile = number // targets.tiles_comm
                    arrived = signals.await_once(
                        arrived, source, comm_tile, comm_tiles, deadline
                    )  # wait [B]
                    targets.fetch(source * per_shard + number, staging, fetched, sizes)
                    fetched += 1
            mbarrier.wait(staging.full, finished & 1)
            finished += 1
            if owner == sizes.rank:
                targets.finish(m, n, number, per_shard, staging.tile, sizes)
            else:
                targets.send(owner, hops, number, per_shard, staging, sizes, signals)
            mbarrier.arrive(staging.empty, count=1)
        place, phase = exchange.take(phase, 1)
    targets.collect(staging, fetched, grid, sizes)
