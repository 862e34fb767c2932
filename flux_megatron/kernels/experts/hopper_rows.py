"""Rows that travel or are copied while the tensor cores multiply: a partition of two warps in the
Hopper kernel of a2a_gemm. Rows of a group are contiguous wherever they lie.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.experts.hopper_routes import Routes
from flux_megatron.kernels.experts.routes import (
    MORE_DRAWS,
    OWN_SEND_TILES,
    RECV_COUNT,
    RECV_ROW,
    RECV_ROWS,
    RECV_TILE,
    RECV_TILES,
    SEND_COUNT,
    SEND_REMOTE_ROW,
    SEND_ROW,
    SEND_TILE,
    SEND_TILES,
)
from flux_megatron.kernels.gluon_versions import Descriptor, Number, Pointer, aggregate
from flux_megatron.kernels.hopper_primitives import count_relaxed_gpu

WARPS = gl.constexpr(2)
BLOCK = gl.constexpr(2 * 32 * 8 * 8)  # 8 units of 16 bytes a thread


@gluon.jit
def copy_rows(target, source, rows, columns):
    """The first `rows` rows, which are contiguous; none if there are fewer than one."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    size = rows * columns
    for first in range(0, size, BLOCK):
        offsets = first + gl.arange(0, BLOCK, layout)
        inside = offsets < size
        gl.store(target + offsets, gl.load(source + offsets, mask=inside), mask=inside)


@gluon.jit
def clear_rows(target, rows, columns, dtype: gl.constexpr):
    """Set as many rows to 0."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    size = rows * columns
    zeros = gl.zeros([BLOCK], dtype, layout)
    for first in range(0, size, BLOCK):
        offsets = first + gl.arange(0, BLOCK, layout)
        gl.store(target + offsets, zeros, mask=offsets < size)


@aggregate
class TravellingRows:
    """Rows of x [T, K] on the way to their experts, and what else `a2a_gemm` leaves in memory: the
    rows that came in `kept` [capacity, K], and zeros behind the results in y [capacity, N].
    """

    x: Pointer
    kept: Pointer
    y: Pointer
    received_desc: Descriptor
    routes: Routes
    capacity: Number
    N: Number
    K: Number
    ROWS: gl.constexpr
    BLOCK_M: gl.constexpr
    KEEP: gl.constexpr

    @gluon.jit
    def push(self, tile):
        """Rows of a remote group, the `tile`-th of all that are sent."""
        routes = self.routes
        group = routes.group_at(SEND_TILE, tile, WARPS)
        owner = (routes.rank + routes.WORLD_SIZE - group // routes.EXPERTS) % routes.WORLD_SIZE
        row = (tile - routes.of_group(SEND_TILE, group)) * self.ROWS
        first = (routes.of_group(SEND_ROW, group) + row).to(gl.int64)
        there = (routes.of_group(SEND_REMOTE_ROW, group) + row).to(gl.int64)
        rows = min(routes.of_group(SEND_COUNT, group) - row, self.ROWS)
        target = routes.region(owner, self.received_desc.dtype)
        copy_rows(target + there * self.K, self.x + first * self.K, rows, self.K)
        routes.announce(SEND_TILE, SEND_COUNT, group, owner, 1, self.ROWS)  # signal [Y]

    @gluon.jit
    def clear(self, number):
        """ROWS rows of y behind those that came."""
        row = gl.load(self.routes.word(RECV_ROWS)) + number * self.ROWS
        rows = min(self.capacity - row, self.ROWS)
        clear_rows(self.y + row.to(gl.int64) * self.N, rows, self.N, self.received_desc.dtype)

    @gluon.jit
    def keep(self, number, deadline):
        """A quarter of the rows of a GEMM tile, from x or, when they have come, from the region."""
        routes = self.routes
        QUARTER: gl.constexpr = self.BLOCK_M // 4
        tile = number // 4
        group = routes.group_at(RECV_TILE, tile, WARPS)
        step = group // routes.EXPERTS
        row = (tile - routes.of_group(RECV_TILE, group)) * self.BLOCK_M + number % 4 * QUARTER
        place = (routes.of_group(RECV_ROW, group) + row).to(gl.int64)
        rows = min(routes.of_group(RECV_COUNT, group) - row, QUARTER)
        if step == 0:
            first = (routes.of_group(SEND_ROW, group) + row).to(gl.int64)
            copy_rows(self.kept + place * self.K, self.x + first * self.K, rows, self.K)
        else:
            slot = routes.slot_of((routes.rank + step) % routes.WORLD_SIZE, group % routes.EXPERTS)
            routes.await_new(-1, slot, deadline)  # wait [Y]
            source = routes.region(routes.rank, self.received_desc.dtype)
            copy_rows(self.kept + place * self.K, source + place * self.K, rows, self.K)


@gluon.jit
def send_rows(moved):
    """Two warps: pushes first, which wait for nobody; copies of what others send come last."""
    routes = moved.routes
    deadline = routes.signals.deadline()
    own = gl.load(routes.word(OWN_SEND_TILES))
    pushes = gl.load(routes.word(SEND_TILES)) - own
    last = pushes + gl.cdiv(moved.capacity - gl.load(routes.word(RECV_ROWS)), moved.ROWS)
    cleared = last
    if moved.KEEP:
        last += 4 * gl.load(routes.word(RECV_TILES))
    draws = routes.word(MORE_DRAWS)
    number = count_relaxed_gpu(draws) - 1
    while number < last:
        if number < pushes:
            moved.push(own + number)
        elif number < cleared:
            moved.clear(number - pushes)
        else:
            moved.keep(number - cleared, deadline)
        number = count_relaxed_gpu(draws) - 1
