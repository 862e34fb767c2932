"""The fused strategy for Hopper GPUs: FLUX's tiles at the speed of a library GEMM.

It differs from `fused` in who moves tiles. Large problems leave it to the copy engine, because
stores of the SMs into a peer's memory disturb the GEMM; small ones let a spare warp of the kernel
do it, because a copy engine takes 10 us to begin (`Plan.transport`).

    AG+GEMM, rank r: as `fused`; a producer warp waits [A] and loads, others multiply
    GEMM+RS, rank r, by the copy engine
    caller's stream   one kernel: tiles of r+1 count [D] | of r+2 | ... | of r: wait [B], add, store
    copy engine       wait [D] of a few tiles, copy them to r+1, signal [B] | ...
    by the SMs        the kernel's store warp copies each tile to its owner, signal [B]
    GEMM+AR           that warp copies each sum to every rank, signal [A]; or the copy engine does:
                      wait [D] of a few sums, copy them to all, signal [A] | ...
    GEMM+AR, rank r, of a small y: that warp copies each tile to every rank, and each adds all up

The kernels' own files are imported when they are called: they need Gluon, of which a newer Triton
may lack names, as `supports` says then.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.sizes import cdiv, part_columns, tiles_of_shard
from flux_megatron.overlap import arrivals, hopper_plans, transfer
from flux_megatron.overlap.gather import add_gather, all_reduced
from flux_megatron.overlap.hopper_pushes import BEHIND_WAVES, most_comm_tiles
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import COMM_TILES_MAX, Problem, Tile
from flux_megatron.scaling import E4M3, Scaling, result_dtype
from flux_megatron.symm.enqueue import always
from flux_megatron.symm.program import Builder, CallProgram, ChannelSlots
from flux_megatron.symm.signals import MAX_COMM_TILES
from flux_megatron.symm.steps import Slot

if TYPE_CHECKING:
    from flux_megatron.kernels.hopper.gathered_sums import Gathering


_Sums = tuple[ChannelSlots, Slot]  # the gather channel, and the local sums that go there

NEEDS_SYMMETRIC_MEMORY = True
default_plan, candidates = hopper_plans.default_plan, hopper_plans.candidates
why_not = hopper_plans.why_not


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    if not 1 < problem.world_size <= COMM_TILES_MAX:
        return f"{problem.world_size} ranks given, 2 to {COMM_TILES_MAX} expected"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1: the kernel would wait for pushes that come after its launch"
    return _unequal_shards(problem) or hopper_gemm.supports(problem)


def _unequal_shards(problem: Problem) -> str | None:
    """Why not every rank sums rows, or None. Of GEMM+AR the last one may sum fewer."""
    R = problem.world_size
    if problem.pattern is Pattern.GEMM_AR and (R - 1) * cdiv(problem.M, R) < problem.M:
        return None
    return transfer.unequal_shards(problem)


def _ag_gemm(p: CallProgram) -> Slot:
    from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm

    borrows, (M_shard, K) = p.caller_steps, p.x.shape
    comm_rows = p.plan.comm_rows and max(p.plan.comm_rows, cdiv(M_shard, COMM_TILES_MAX))
    k_parts = max(1, min(p.plan.k_parts, COMM_TILES_MAX))
    tile = p.plan.tile
    if tile.block_m > M_shard:  # a tile lies within a shard
        tile = replace(hopper_config.LOW[0], block_k=tile.block_k)
    columns = part_columns(K, k_parts, tile.block_k) if k_parts > 1 else 0
    gather = add_gather(p, p.x, comm_rows, local_copy="nobody", part_columns=columns)
    with p.phase("ag_gemm kernel"):
        y: Slot = hopper_ag_gemm.ag_gemm(
            p.x, gather.gathered, p.w, p.bias, **transfer.waits(gather.channel),
            **_words(gather.channel), rank=p.rank, comm_rows=gather.comm_rows, layout=p.layout,
            tile=tile, copy_local=borrows, k_parts=k_parts, scaling=p.scaling,
        )  # fmt: skip
    gather.bring()
    if borrows:
        p.caller_step(gather.complete())
    gather.close(by_kernel=True)
    return y


def _words(channel: ChannelSlots) -> dict[str, Any]:
    return {
        "partial_counters": channel.fixed("partial_counters"),
        "work_words": channel.fixed("work_counter"),
    }


def _push_tiles(
    p: CallProgram, channel: ChannelSlots, outgoing: Slot, M_shard: int, N: int, tile: Tile,
    tiles_comm: int, sums: _Sums | None, behind: int,
) -> None:  # fmt: skip
    """Push the tiles of every other rank, in communication tiles of `tiles_comm` tiles, each behind
    the wait [D] for their count and before its signal [B]; and the local `sums` likewise to all
    ranks, with signals [A].
    """
    tiles, R = tiles_of_shard(M_shard, N, tile), p.world_size
    tile_bytes = _rows(tile, p.scaling) * tile.block_n * outgoing.element_size()
    counters = channel.fixed("tile_counters").operand

    def made_at(which: tuple[int, int]) -> int:
        hops, comm_tile = which
        last = min((comm_tile + 1) * tiles_comm, tiles) - 1
        return hopper_gemm.made_at(hops, last, M_shard, N, R, tile)

    counted, arriving = [], list[arrivals.Part]()
    numbers = range(cdiv(tiles, tiles_comm))
    order: Iterable[tuple[int, int]]
    if sums:
        order = _in_turns(R, len(numbers), behind)
    else:  # the last tile of one tells when it is ready: the order costs time, never the result
        order = sorted(itertools.product(range(R - 1), numbers), key=made_at)
    for hops, comm_tile in order:
        owner, first = (p.rank + 1 + hops) % R, comm_tile * tiles_comm
        count = min(tiles_comm, tiles - first)
        if owner == p.rank and p.space.mailboxes:
            # What these sums wait for comes first: with CUDA_DEVICE_MAX_CONNECTIONS=1 it may stand
            # behind the copy engine's wait for them.
            arrivals.bring(p, arriving)
            arriving = []
        counted.append(counters.plus(4 * (owner * MAX_COMM_TILES + comm_tile)))
        p.move("wait_count", counted[-1], always(count))  # wait [D]
        to, made, first_made, size = channel, outgoing, hops * tiles + first, tile_bytes
        peers = [(owner, (p.rank - 1 - hops) % R)]
        if sums and owner == p.rank:
            to, made = sums
            first_made, size = first, tile.block_m * tile.block_n * made.element_size()
            peers = [((p.rank - step) % R, (p.rank + step) % R) for step in range(1, R)]
        for peer, source in peers:
            p.move(
                "copy", to.peer(peer, (p.rank * tiles + first) * size),
                made.operand.plus(first_made * size), always(count * size),
            )  # fmt: skip
            p.move("signal", to.signal(peer, p.rank, comm_tile), to.epoch)  # signal [B], [A]
            here = (source * tiles + first) * size, count * size
            arriving.append(arrivals.Part(to.number, source, comm_tile, (here,)))
    for counter in counted:
        p.move("write", counter, always(0))
    if p.space.mailboxes:
        arrivals.bring(p, arriving)


def _in_turns(world_size: int, comm_tiles: int, behind: int) -> Iterator[tuple[int, int]]:
    """Of communication tiles in the order of `tile_in_turns`: whose shard, and the number in it."""
    for turn in range(comm_tiles + behind):
        if turn < comm_tiles:
            yield from ((hops, turn) for hops in range(world_size - 1))
        if turn >= behind:
            yield world_size - 1, turn - behind


def _rows(tile: Tile, scaling: Scaling | None) -> int:
    """Of a tile that travels: behind one of e4m3 its scale has a row."""
    return tile.block_m + bool(scaling and scaling.wire)


def _gemm_rs(
    p: CallProgram, gathering: Gathering | None = None, sums: _Sums | None = None,
    last: bool = True,
) -> Slot:  # fmt: skip
    """x @ w, tiles sent on as they are made, and their sum, which is part of the kernel: y
    [M_shard, N], or all rows of the `gathering`, whose `sums` copy engines push. The caller step is
    the `last` thing of a call.
    """
    from flux_megatron.kernels.hopper import gemm_rs as hopper_gemm_rs

    M_shard, N = cdiv(len(p.x), p.world_size), p.N
    tile, by_sm = p.plan.tile, p.plan.transport == "sm"
    tiles, rows = tiles_of_shard(M_shard, N, tile), _rows(tile, p.scaling)
    dtype = E4M3 if rows > tile.block_m else result_dtype(p.x, p.scaling)
    rows *= tiles
    channel = p.channel(transfer.SCATTER, p.world_size * rows * tile.block_n * dtype.itemsize)
    comm_rows = transfer.tile_rows(p, M_shard, p.plan.comm_rows)
    wanted = cdiv(M_shard, comm_rows) if comm_rows else 1
    behind, tiles_comm = 0, cdiv(tiles, min(COMM_TILES_MAX, wanted))
    if sums:  # in one batch with its signal a wait for the only one could stand before it
        tiles_comm = cdiv(tiles, min(most_comm_tiles(p.world_size), max(2, wanted)))
        waves_tiles = round(BEHIND_WAVES * hopper_config.resident_ctas(p.device))
        behind = cdiv(waves_tiles, tiles_comm * p.world_size)
    received = channel.region((p.world_size * rows, tile.block_n), dtype)
    outgoing: Slot = received
    if not by_sm:
        outgoing = p.x.new_empty((p.world_size - 1) * rows, tile.block_n, dtype=dtype)
        p.move("fork")  # before the kernel: what is pushed waits for tiles, not for its end
    with p.phase("gemm_rs kernel"):
        y: Slot = hopper_gemm_rs.gemm_rs(
            p.x, p.w, outgoing=outgoing, received=received,
            received_pointers=channel.fixed("pointers"),
            pad_pointers=channel.fixed("pad_pointers"), **transfer.waits(channel),
            counters=channel.fixed("tile_counters"), **_words(channel), rank=p.rank,
            world_size=p.world_size, tiles_comm=tiles_comm, layout=p.layout, tile=tile,
            by_sm=by_sm, gathering=gathering, behind=behind, scaling=p.scaling,
        )  # fmt: skip
    if not by_sm:
        with p.phase("scatter push"):
            _push_tiles(p, channel, outgoing, M_shard, N, tile, tiles_comm, sums, behind)
    if last:
        p.caller_step()
    if not by_sm:
        p.move("join")
        if p.space.mailboxes:
            arrivals.end(p)
    return y


def _gemm_ar(p: CallProgram) -> Slot:
    """The kernel stores its sums at every rank, or for copy engines, and copies those of the others
    to y.
    """
    from flux_megatron.kernels.hopper.gathered_sums import Gathering

    if p.plan.transport == "exchange":
        return _exchanged(p)
    by_engine, tile = p.plan.transport == "engines", p.plan.tile
    if p.space.mailboxes and not by_engine:  # where no kernel stores at every rank
        return all_reduced(p, _gemm_rs(p, last=False))
    M, N = len(p.x), p.N
    y = p.x.new_empty(M, N)
    rows, columns = cdiv(M, p.world_size), N  # the last rank may have fewer
    if by_engine:
        rows, columns = tile.block_m * tiles_of_shard(rows, N, tile), tile.block_n
    sums = p.x.new_empty(rows, columns) if by_engine else None
    channel = p.channel(transfer.GATHER, p.world_size * rows * columns * y.element_size())
    gathered = channel.region((p.world_size * rows, columns), y.dtype)
    gathering = Gathering(
        y, gathered, channel.fixed("pointers"), channel.fixed("pad_pointers"), channel.fixed("pad"),
        channel.epoch, channel.fixed("work_counter"), sums,
    )  # fmt: skip
    return _gemm_rs(p, gathering, None if sums is None else (channel, sums))


def _exchanged(p: CallProgram) -> Slot:
    """Every rank stores its results at all ranks, and each adds all of them up: one trip."""
    from flux_megatron.kernels.hopper.gemm_exchange import gemm_exchange

    M, N, dtype = len(p.x), p.N, result_dtype(p.x, p.scaling)
    block_bytes = M * N * dtype.itemsize
    channel = p.channel(transfer.SCATTER, p.world_size * block_bytes)
    received = channel.region((p.world_size, M, N), dtype)
    with p.phase("gemm kernel"):
        gemm_exchange(
            p.x, p.w, own=channel.region((M, N), dtype, p.rank * block_bytes), received=received,
            received_pointers=channel.fixed("pointers"),
            pad_pointers=channel.fixed("pad_pointers"), counters=channel.fixed("tile_counters"),
            **transfer.waits(channel), **_words(channel), rank=p.rank, world_size=p.world_size,
            layout=p.layout, tile=p.plan.tile, scaling=p.scaling,
        )  # fmt: skip
    p.caller_step()
    return transfer.ReduceScatter(channel, received, M).finish()


BUILDERS: dict[Pattern, Builder] = {COLUMN: _ag_gemm, ROW: _gemm_rs, Pattern.GEMM_AR: _gemm_ar}
