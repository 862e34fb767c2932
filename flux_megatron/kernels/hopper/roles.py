"""The loops over work tiles that all Hopper kernels share: those of the producer warp and of the
warp groups that multiply.

What patterns do differently is in the methods of their `operands` (whose rows of x a tile
needs, and when they are there) and `epilogue` (what is added to a tile, and where it goes).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def produce(operands, ring, exchange, scheduler):
    """One warp: draws this CTA's work tiles and loads the operands of their tiles, the first ones
    while it does not know yet whether their tile is its own.
    """
    grid = operands.sizes.grid_here()
    deadline, arrived = operands.begin()  # of waits, and what needs none any more
    ticket = scheduler.begin()
    loaded = 0
    if gl.program_id(0) < scheduler.by_id:
        work = scheduler.tiles.locate(gl.program_id(0), grid.k_tiles)
        loaded = operands.load_ahead(ring, grid, work)
    place = scheduler.first(ticket)
    if place != gl.program_id(0):
        ring.forget(loaded)
        loaded = 0
    ahead = loaded
    phase = 0
    while place < scheduler.tiles.count:
        work = scheduler.tiles.locate(place, grid.k_tiles).behind(ahead)
        owner, row, col = operands.locate(work.tile, grid, scheduler.tiles)
        phase = exchange.hand_out(place, phase, owner, row, col)
        loaded, ticket, arrived = operands.load(
            ring, scheduler, work, owner, row, col, loaded, arrived, deadline
        )
        ahead = 0
        place = scheduler.settle(ticket)
    exchange.hand_out(place, phase)
    scheduler.close(place)


@gluon.jit
def multiply(epilogue, ring, exchange, tiles, partials, NUM_WARPS: gl.constexpr):
    """Both warp groups, or one of them: multiply, add up split tiles, and hand each tile to the
    epilogue.
    """
    grid = epilogue.sizes.grid()
    deadline = 0
    if tiles.SPLITS:
        deadline = epilogue.signals.deadline()
    multiplied = 0
    fetched = 0
    finished = 0
    number = 0
    place, owner, row, col, phase = exchange.take_tile(0, NUM_WARPS)
    while place < tiles.count:
        work = tiles.locate(place, grid.k_tiles)
        out, behind, multiplied, fetched = epilogue.accumulate(
            ring, grid, work, owner, multiplied, fetched, number
        )
        number += 1
        mine = True
        if tiles.SPLITS:
            mine = work.part == 0
            if not mine:
                partials.store(out, work)
            elif work.parts > 1:
                out = partials.fix_up(out, work, deadline, epilogue.signals.status)
        if mine:
            row += ring.GROUP * ring.ROWS
            fetched, finished = epilogue.finish(out, row, col, behind, fetched, finished)
        place, owner, row, col, phase = exchange.take_tile(phase, NUM_WARPS)
    epilogue.complete()
