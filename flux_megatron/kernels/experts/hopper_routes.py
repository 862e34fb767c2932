"""The routes of expert parallelism (`experts.routes`) as the Hopper kernels read and serve them:
which tile belongs to which group, when a group's rows have come, and who hears of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flux_megatron.kernels.experts.routes import (
    FIELDS,
    RECV_COUNT,
    RECV_TILE,
    WORDS,
)
from flux_megatron.kernels.gluon_versions import Number, Pointer, aggregate, tma_store
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.tile_order import tile_in_groups
from flux_megatron.kernels.hopper_primitives import (
    MAX_COMM_TILES,
    count_acq_rel_gpu,
    signal_release_sys,
    uniform,
    wait_acquire_sys,
)


@aggregate
class GroupTile:
    """A GEMM tile: its group, the rows of that, and the tile's first row and its column of tiles
    within.
    """

    group: Number
    count: Number
    row: Number
    n: Number

    @gluon.jit
    def encoded(self, BLOCK_M: gl.constexpr):
        """Three numbers: 2 * its group, + 1 if it has half a tile of rows at most; row; n."""
        half = (self.count - self.row <= BLOCK_M // 2).to(gl.int32)
        return self.group * 2 + half, self.row, self.n


@aggregate
class Routes:
    """The words of `experts.routes`, and the regions and pads of all ranks.

    `BLOCK_G` is a power of two, at least the number of groups.
    """

    words: Pointer
    pointers: Pointer
    pad_pointers: Pointer
    signals: Signals
    rank: Number
    WORLD_SIZE: gl.constexpr
    EXPERTS: gl.constexpr
    PER_SIGNAL: gl.constexpr
    BLOCK_G: gl.constexpr
    HEADER: gl.constexpr

    @gluon.jit
    def of_group(self, number: gl.constexpr, group):
        """A field of a group."""
        return gl.load(self.words + number * self.WORLD_SIZE * self.EXPERTS + group)

    @gluon.jit
    def word(self, number: gl.constexpr):
        """The address of a word."""
        return self.words + FIELDS * self.WORLD_SIZE * self.EXPERTS + number

    @gluon.jit
    def group_at(self, number: gl.constexpr, tile, NUM_WARPS: gl.constexpr):
        """The group of the `tile`-th tile, in a partition of `NUM_WARPS`; `number` is a field of
        first tiles.
        """
        GROUPS: gl.constexpr = self.WORLD_SIZE * self.EXPERTS
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        lanes = gl.arange(0, self.BLOCK_G, layout)
        first = gl.load(self.words + number * GROUPS + lanes, mask=lanes < GROUPS, other=2147483647)
        return uniform(gl.sum((first <= tile).to(gl.int32), 0)) - 1

    @gluon.jit
    def locate(self, tile, columns, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr):
        """A tile, in a partition of one warp.

        Its group's rows of tiles go column by column in equal parts of at most GROUP_M: a few rows
        alone would read all of w again.
        """
        group = self.group_at(RECV_TILE, tile // columns, 1)
        count = uniform(self.of_group(RECV_COUNT, group))
        within = tile - uniform(self.of_group(RECV_TILE, group)) * columns
        rows = gl.cdiv(count, BLOCK_M)
        height = gl.cdiv(rows, gl.cdiv(rows, GROUP_M))
        m, n = tile_in_groups(within, rows, columns, height)
        return GroupTile(group, count, uniform(m * BLOCK_M), uniform(n))

    @gluon.jit
    def region(self, owner, dtype: gl.constexpr):
        """The rows of a rank's region."""
        address = gl.load(self.pointers + owner) + self.HEADER
        return gl.multiple_of(address.to(gl.pointer_type(dtype)), 16)

    @gluon.jit
    def slot_of(self, source, expert):
        """Where `source` announces rows of its groups for, or of, an expert."""
        return source * MAX_COMM_TILES + 1 + expert // self.PER_SIGNAL

    @gluon.jit
    def await_new(self, awaited, slot, deadline):
        """Wait for a slot, unless it is the one that was awaited last; gives the last one now."""
        if slot != awaited:
            signals = self.signals
            wait_acquire_sys(signals.pad, slot, signals.epoch, deadline, signals.status)
        return slot

    @gluon.jit
    def announce(
        self, tiles: gl.constexpr, counts: gl.constexpr, group, owner, per_row, BLOCK: gl.constexpr
    ):
        """Count a tile of a group, of `per_row` for each BLOCK rows; the last tile of the experts
        that share its signal tells `owner`. `tiles` and `counts` are fields.
        """
        SIGNALS: gl.constexpr = (self.EXPERTS + self.PER_SIGNAL - 1) // self.PER_SIGNAL
        step = group // self.EXPERTS
        number = group % self.EXPERTS // self.PER_SIGNAL
        first = step * self.EXPERTS + number * self.PER_SIGNAL
        last = step * self.EXPERTS + min((number + 1) * self.PER_SIGNAL, self.EXPERTS) - 1
        end = self.of_group(tiles, last) + gl.cdiv(self.of_group(counts, last), BLOCK)
        arrivals = (end - self.of_group(tiles, first)) * per_row
        if count_acq_rel_gpu(self.word(WORDS) + step * SIGNALS + number, arrivals):
            pad = gl.load(self.pad_pointers + owner).to(self.signals.pad.dtype)
            slot = self.rank * MAX_COMM_TILES + 1 + number
            signal_release_sys(pad, slot, self.signals.epoch)  # signal [Y] [Z]


@gluon.jit
def expert_operand(expert, n, w_first, w_pitch, sizes, LAYOUT_NN: gl.constexpr):
    """Where column of tiles `n` of an expert's matrix lies in those of all experts: the row from
    which its k-tiles count, and its place on the other side. "nt": [rows, K], else [rows, N]; the
    matrix begins at row w_first + expert * w_pitch (`experts.weights`).
    """
    first = w_first + expert * w_pitch
    col = n * sizes.BLOCK_N
    if LAYOUT_NN:
        w_row = first
        w_col = col
    else:
        w_row = 0
        w_col = first + col
    return w_row, w_col


@gluon.jit
def store_clipped(base, tile, made, sizes, made_desc):
    """Begin to store a tile `made` in its group's rows [count, N] at `base`, no further than their
    end. `made_desc` is any descriptor of such tiles.
    """
    desc = tma.make_tensor_descriptor(
        base, [tile.count, sizes.N], [sizes.N, 1], [sizes.BLOCK_M, sizes.BLOCK_N], made_desc.layout
    )
    tma_store(desc, [tile.row, tile.n * sizes.BLOCK_N], made)
