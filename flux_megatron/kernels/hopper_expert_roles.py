"""The loops over tiles of the Hopper kernels of expert parallelism: as `hopper_roles`, but how many
tiles there are only the device knows, and the last rows of a group may fill half a tile at most.
Such a tile is multiplied as half a one, by all MMA warps.

The producer knows which rows a tile has, so it says to the others which tiles are halves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def produce_groups(operands, ring, exchange, scheduler, HALVES: gl.constexpr):
    """One warp: draws this CTA's tiles, says which they are, and loads their operands."""
    grid = operands.sizes.grid_here()
    deadline = operands.deadline()
    awaited = operands.none_awaited()
    loaded = 0
    phase = 0
    place = scheduler.first(scheduler.begin())
    while place < scheduler.tiles.count:
        tile = operands.locate(place, grid)
        told = place * 2
        if HALVES:
            told += (tile.count - tile.row <= operands.sizes.BLOCK_M // 2).to(gl.int32)
        phase = exchange.hand_out(told, phase)
        work = scheduler.tiles.locate(place, grid.k_tiles)
        loaded, ticket, awaited = operands.load(
            ring, scheduler, tile, work, loaded, awaited, deadline
        )
        place = scheduler.settle(ticket)
    exchange.hand_out(place * 2, phase)
    scheduler.close(place)


@gluon.jit
def multiply_groups(
    ring, staging, exchange, tiles, sizes, LAYOUT: gl.constexpr, HALF_LAYOUT: gl.constexpr,
    HALVES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Two warp groups: multiply, and hand each tile to the store warp."""
    k_tiles = gl.cdiv(sizes.K, sizes.BLOCK_K)
    halves = ring.of_rows(sizes.BLOCK_M // 2)
    multiplied = 0
    finished = 0
    told, phase = exchange.take(0, NUM_WARPS)
    while told // 2 < tiles.count:
        if HALVES and told % 2 == 1:
            multiplied = _multiply(
                halves, staging, sizes, k_tiles, multiplied, finished, HALF_LAYOUT
            )
        else:
            multiplied = _multiply(ring, staging, sizes, k_tiles, multiplied, finished, LAYOUT)
        finished += 1
        told, phase = exchange.take(phase, NUM_WARPS)


@gluon.jit
def _multiply(ring, staging, sizes, k_tiles, multiplied, finished, LAYOUT: gl.constexpr):
    out = gl.zeros((ring.ROWS, sizes.BLOCK_N), gl.float32, LAYOUT)
    out, multiplied = ring.multiply(out, 0, k_tiles, multiplied)
    staging.hand_over(out, finished)
    return multiplied


@gluon.jit
def store_groups(targets, staging, exchange, tiles):
    """One warp: stores each finished tile."""
    grid = targets.sizes.grid_here()
    finished = 0
    told, phase = exchange.take(0, 1)
    while told // 2 < tiles.count:
        targets.store(told // 2, grid, staging, finished)
        finished += 1
        told, phase = exchange.take(phase, 1)
