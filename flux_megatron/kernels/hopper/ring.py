"""The ring of stages from the producer warp to the MMA warps of a Hopper kernel.

The producer runs ahead: it waits until a stage is `empty`, loads the operands of one k-tile into it
by TMA, and `full` completes when they are there. Two warp groups multiply, 64 rows each: a wgmma
reads its stage while the one before finishes.

The two are one partition, or two. As two the first ends a tile before the second (`led`): one
multiplies while the other stores, so that the tensor cores work between tiles too (decision 0006).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flux_megatron.kernels.gluon_versions import Shared, aggregate, tma_load
from flux_megatron.kernels.hopper_primitives import begin_draw

DRAW_AHEAD = gl.constexpr(4)  # k-tiles before the last: 16 were no faster (tile_order.jsonl)


@gluon.constexpr_function
def mma_layout(columns, num_warps, k=16):
    """Of the sums of so many columns, which warps share by rows. An MMA takes `k` elements of K,
    which moves no register.
    """
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, k]
    )


@aggregate
class OperandRing:
    """Stages of x [STAGES, BLOCK_M, BLOCK_K] and of w, and their full and empty barriers.
    Of GROUPS partitions that multiply, number GROUP has the ROWS rows of x from GROUP * ROWS on.
    The first ends a tile up to LEAD k-tiles before the second; `led` are two barriers that say so,
    for tiles in turn. Tensor cores add FP8 products up with fewer bits than fp32 has: with
    SPLIT_ACCUMULATOR they do so within a k-tile only.
    """

    x: Shared
    w: Shared
    full: Shared
    empty: Shared
    led: Shared
    LAYOUT_NN: gl.constexpr
    ROWS: gl.constexpr
    GROUP: gl.constexpr
    GROUPS: gl.constexpr
    LEAD: gl.constexpr
    SCALED: gl.constexpr  # FP8
    SPLIT_ACCUMULATOR: gl.constexpr

    @gluon.jit
    def of_rows(self, rows: gl.constexpr):
        """The same ring, of tiles with so many rows."""
        return self._of(rows, 0)

    @gluon.jit
    def of_group(self, group: gl.constexpr):
        """The same ring, for one of the partitions that multiply."""
        return self._of(self.x.shape[1] // self.GROUPS, group)

    @gluon.jit
    def _of(self, rows: gl.constexpr, group: gl.constexpr):
        return OperandRing(
            self.x, self.w, self.full, self.empty, self.led, self.LAYOUT_NN, rows, group,
            self.GROUPS, self.LEAD, self.SCALED, self.SPLIT_ACCUMULATOR,
        )  # fmt: skip

    @gluon.jit
    def load_k_tiles(self, x_desc, w_desc, row, col, first, last, loaded, w_row=0):
        """Load k-tiles `first` to `last` of the tile at (row, col), each when its stage is empty.

        A w of layout [K, N] begins at `w_row` of its descriptors. `loaded` counts the k-tiles of
        this CTA so far; gives the new count.
        """
        STAGES: gl.constexpr = self.x.shape[0]
        BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
        NBYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
        for k_tile in range(first, last):
            stage = loaded % STAGES
            full = self.full.index(stage)
            k = k_tile * BLOCK_K
            mbarrier.wait(self.empty.index(stage), (loaded // STAGES & 1) ^ 1)
            mbarrier.expect(full, NBYTES)
            tma_load(x_desc, [row, k], full, self.x.index(stage))
            if self.LAYOUT_NN:
                tma_load(w_desc, [w_row + k, col], full, self.w.index(stage))
            else:
                tma_load(w_desc, [col, k], full, self.w.index(stage))
            loaded += 1
        return loaded

    @gluon.jit
    def load_ahead(self, x_desc, w_desc, row, col, work):
        """`load_k_tiles` of the first work tile of a CTA, as many as there are stages; gives their
        number.
        """
        loaded = 0
        last = min(work.last, work.first + self.x.shape[0])
        return self.load_k_tiles(x_desc, w_desc, row, col, work.first, last, loaded)

    @gluon.jit
    def forget(self, loaded):
        """Make the ring as new, when the first `loaded` k-tiles have come, of a tile that another
        CTA makes. The MMA warps have been told of no tile, so that none of them waits here.
        """
        for stage in range(loaded):
            mbarrier.wait(self.full.index(stage), 0)
            mbarrier.invalidate(self.full.index(stage))
            mbarrier.init(self.full.index(stage), count=1)
        fence_async_shared()  # TMA arrives there

    @gluon.jit
    def load_tile(self, x_desc, w_desc, row, col, work, loaded, work_words, w_row=0):
        """`load_k_tiles` of a work tile, and the draw of the next one before the last of them;
        gives its ticket too.
        """
        lead = max(work.first, work.last - DRAW_AHEAD)
        loaded = self.load_k_tiles(x_desc, w_desc, row, col, work.first, lead, loaded, w_row)
        ticket = begin_draw(work_words)
        loaded = self.load_k_tiles(x_desc, w_desc, row, col, lead, work.last, loaded, w_row)
        return loaded, ticket

    @gluon.jit
    def zeros(self, NUM_WARPS: gl.constexpr):
        """The sums of a tile."""
        COLUMNS: gl.constexpr = self.w.shape[2 if self.LAYOUT_NN else 1]
        return gl.zeros((self.ROWS, COLUMNS), gl.float32, mma_layout(COLUMNS, NUM_WARPS))

    @gluon.jit
    def multiply(self, sums, first, last, multiplied, number=0):
        """The sums + the products of k-tiles `first` to `last`, in the MMA warps.

        `multiplied` counts the k-tiles of this CTA so far; gives the new count too. `number` counts
        its work tiles, where two partitions multiply.

        The second waits before its last LEAD k-tiles until the first has issued its own. These are
        in the ring by then: with the stage that the second still reads they are LEAD + 1, at most
        all. The first cannot be two work tiles ahead, because both take each from the exchange:
        two barriers are enough.
        """
        STAGES: gl.constexpr = self.x.shape[0]
        awaiting = max(first, last - self.LEAD)
        if self.SCALED:
            WARPS: gl.constexpr = self.ROWS // 16
            FP8: gl.constexpr = mma_layout(sums.shape[1], WARPS, 32)
            sums = gl.convert_layout(sums, FP8)
        if self.SPLIT_ACCUMULATOR:
            sums, multiplied = self._add_products(sums, first, last, awaiting, multiplied, number)
        else:
            acc = warpgroup_mma_init(sums)
            for k_tile in range(first, last):
                self._follow_lead(k_tile == awaiting, number)
                acc = self.multiply_k_tile(acc, multiplied, k_tile == first)
                multiplied += 1
        if self.GROUPS == 2 and self.LEAD > 0 and self.GROUP == 0:
            mbarrier.arrive(self.led.index(number & 1), count=1)
        if not self.SPLIT_ACCUMULATOR:
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(self.empty.index((multiplied + STAGES - 1) % STAGES), count=1)
        if self.SCALED:
            sums = gl.convert_layout(sums, mma_layout(sums.shape[1], WARPS))
        return sums, multiplied

    @gluon.jit
    def _follow_lead(self, wanted, number):
        """Wait, if `wanted`, until the other partition has issued its tile's MMAs."""
        if self.GROUPS == 2 and self.LEAD > 0 and self.GROUP == 1:
            mbarrier.wait(self.led.index(number & 1), number >> 1 & 1, pred=wanted)

    @gluon.jit
    def _add_products(self, sums, first, last, awaiting, multiplied, number):
        """`multiply` with a split accumulator: the product of each k-tile is one of its own, which
        the registers add to the sums while tensor cores make the next. Two products take turns.
        """
        FP8: gl.constexpr = mma_layout(sums.shape[1], self.ROWS // 16, 32)
        even = gl.zeros(sums.shape, gl.float32, FP8)
        odd = gl.zeros(sums.shape, gl.float32, FP8)
        self._follow_lead(first == awaiting, number)
        issued = self._issue_product(even, multiplied)
        k_tile = first + 1
        while k_tile + 1 < last:
            self._follow_lead(k_tile == awaiting, number)
            other = self._issue_product(odd, multiplied + 1)
            even, sums = self._add_product(issued, sums, multiplied, 1)
            self._follow_lead(k_tile + 1 == awaiting, number)
            issued = self._issue_product(even, multiplied + 2)
            odd, sums = self._add_product(other, sums, multiplied + 1, 1)
            multiplied += 2
            k_tile += 2
        if k_tile < last:
            self._follow_lead(k_tile == awaiting, number)
            other = self._issue_product(odd, multiplied + 1)
            even, sums = self._add_product(issued, sums, multiplied, 1)
            odd, sums = self._add_product(other, sums, multiplied + 1, 0)
            multiplied += 2
        else:
            even, sums = self._add_product(issued, sums, multiplied, 0)
            multiplied += 1
        return sums, multiplied

    @gluon.jit
    def _issue_product(self, product, multiplied):
        """The product of a k-tile, issued into the registers of one that has been added."""
        x_buf, w_buf = self._full_stage(multiplied)
        acc = warpgroup_mma_init(product)
        return warpgroup_mma(x_buf, w_buf, acc, use_acc=False, is_async=True)

    @gluon.jit
    def _add_product(self, issued, sums, multiplied, OUTSTANDING: gl.constexpr):
        """The product of a k-tile, done, its stage given back; and the sums with it."""
        product = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(issued,))
        mbarrier.arrive(self.empty.index(multiplied % self.x.shape[0]), count=1)
        return product, sums + product

    @gluon.jit
    def _full_stage(self, multiplied):
        """The operands of the next k-tile for this partition, when they are there."""
        STAGES: gl.constexpr = self.x.shape[0]
        stage = multiplied % STAGES
        mbarrier.wait(self.full.index(stage), multiplied // STAGES & 1)
        x_buf = self.x.index(stage)
        if self.x.shape[1] > self.ROWS:
            x_buf = x_buf.slice(self.GROUP * self.ROWS, self.ROWS)
        w_buf = self.w.index(stage)
        if not self.LAYOUT_NN:
            w_buf = w_buf.permute((1, 0))
        return x_buf, w_buf

    @gluon.jit
    def multiply_k_tile(self, acc, multiplied, first):
        """acc + the next k-tile, issued; the MMAs before it are done, and their stage given back.

        `first`: there are no MMAs before it in flight.
        """
        STAGES: gl.constexpr = self.x.shape[0]
        x_buf, w_buf = self._full_stage(multiplied)
        issued = warpgroup_mma(x_buf, w_buf, acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(issued,)))
        before = (multiplied + STAGES - 1) % STAGES
        mbarrier.arrive(self.empty.index(before), count=1, pred=not first)
        return acc


@gluon.jit
def new_ring(
    x_desc, w_desc, STAGES: gl.constexpr, LAYOUT_NN: gl.constexpr, GROUPS: gl.constexpr = 1,
    LEAD: gl.constexpr = 0, SCALED: gl.constexpr = False, SPLIT_ACCUMULATOR: gl.constexpr = False,
):  # fmt: skip
    """The ring for the blocks of descriptors and so many partitions that multiply."""
    x = new_buffer(x_desc, [STAGES])
    w = new_buffer(w_desc, [STAGES])
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    led = full  # none
    if GROUPS == 2:
        led = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(led.index(i), count=1)
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    return OperandRing(
        x, w, full, empty, led, LAYOUT_NN, ROWS, 0, GROUPS, LEAD, SCALED, SPLIT_ACCUMULATOR
    )


@gluon.jit
def new_buffer(desc, stages: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, stages + desc.block_type.shape, desc.layout)
