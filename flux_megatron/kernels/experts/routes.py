"""Where rows go in expert parallelism: ranks exchange their counts, and each works out all offsets.

    counts [R, E]        rows of this rank for each expert of each rank; never read by the host
    exchange_counts      stores them in every rank's header, signals [X], waits [X] of every rank;
                         then every rank knows all counts C [R sources, R owners, E], checks them,
                         and writes its routes

A **group** is what one rank sends to one expert. `routes` (int32) has eight fields of R * E groups
each, then a few words, then a count of arrivals for every rank and signal. Groups stand in order
(step, expert): received ones from rank + step, sent ones to rank - step, so step 0 is this rank's
own and the ranks serve each other in turn. Received rows lie sorted by (expert, source), sent ones
by (owner, expert).

Experts share a signal where there are more of them than slots. All ranks check the same numbers, so
all refuse the same call: then every count in the routes is 0, and nothing is read or written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    count_acq_rel_gpu,
    deadline_after,
    refuse_release_sys,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.symm import signals

# fields of a group: its first tile among all groups', its first row here and at the other rank
RECV_TILE, RECV_ROW, RECV_COUNT, RECV_REMOTE_ROW = (tl.constexpr(n) for n in range(4))
SEND_TILE, SEND_ROW, SEND_COUNT, SEND_REMOTE_ROW = (tl.constexpr(n) for n in range(4, 8))
FIELDS = tl.constexpr(8)
# words behind the fields: two work counters, sums over all groups, and those of this rank's own
DRAWS, MORE_DRAWS, RECV_TILES, RECV_ROWS, SEND_TILES, OWN_RECV_TILES, OWN_SEND_TILES = (
    tl.constexpr(n) for n in range(7)
)
WORDS = tl.constexpr(8)
_CAPACITY = tl.constexpr(signals.REFUSED_CAPACITY)
_COUNTS = tl.constexpr(signals.REFUSED_COUNTS)
_KINDS = tl.constexpr(signals.REFUSED_KINDS)


@triton.jit
def field(routes, number: tl.constexpr, groups):
    """A field of all groups."""
    return routes + number * groups


@triton.jit
def word(routes, number: tl.constexpr, groups):
    """The address of a word."""
    return routes + FIELDS * groups + number


@triton.jit
def group_of(tiles, tile, groups, BLOCK_G: tl.constexpr):
    """The group of the `tile`-th tile; `tiles` is a field of first tiles."""
    lanes = tl.arange(0, BLOCK_G)
    first = tl.load(tiles + lanes, mask=lanes < groups, other=2147483647)
    return tl.sum((first <= tile).to(tl.int32), 0) - 1


@triton.jit
def announce_group(
    routes, tiles, counts, pad_pointers, step, expert, owner, rank, epoch, per_group,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    PER_SIGNAL: tl.constexpr,
):  # fmt: skip
    """Count a tile of the group (step, expert), of `per_group` for each BLOCK rows; the last tile
    of the experts that share its signal tells `owner`.
    """
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    signals_each: tl.constexpr = (EXPERTS + PER_SIGNAL - 1) // PER_SIGNAL
    number = expert // PER_SIGNAL
    first = step * EXPERTS + number * PER_SIGNAL
    last = step * EXPERTS + tl.minimum(number * PER_SIGNAL + PER_SIGNAL, EXPERTS) - 1
    end = tl.load(tiles + last) + tl.cdiv(tl.load(counts + last), BLOCK)
    arrivals = (end - tl.load(tiles + first)) * per_group
    arrived = word(routes, WORDS, groups) + step * signals_each + number
    if count_acq_rel_gpu(arrived, arrivals):
        pad = tl.load(pad_pointers + owner).to(routes.dtype)
        signal_release_sys(pad, rank * MAX_COMM_TILES + 1 + number, epoch)  # signal [Y] [Z]


@triton.jit
def copy_rows(target, source, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first `count` rows of [ROWS, columns]; both are contiguous."""
    rows = tl.arange(0, ROWS)
    for first in range(0, columns, COLUMNS):
        cols = first + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < count) & (cols[None, :] < columns)
        offsets = rows[:, None].to(tl.int64) * columns + cols[None, :]
        tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


@triton.jit
def _check_counts(
    header, pad, status, capacity,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """1 if all ranks' counts name the rows that they have and fit, else 0 and a refusal."""
    stride: tl.constexpr = WORLD_SIZE * EXPERTS + 1
    ranks = tl.arange(0, BLOCK_R)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    inside = (ranks < WORLD_SIZE) & (experts < EXPERTS)
    good = 1
    for rank in range(0, WORLD_SIZE):
        sent = tl.load(header + rank * stride + ranks * EXPERTS + experts, mask=inside, other=0)
        rows = tl.load(header + rank * stride + WORLD_SIZE * EXPERTS)
        named = tl.sum(tl.sum(sent.to(tl.int64), 1), 0)
        least = tl.min(tl.min(sent, 1), 0)
        if (good == 1) & ((named != rows) | (least < 0)):
            seen = tl.minimum(named, 2147483647).to(tl.int32)
            refuse_release_sys(pad, _KINDS * rank + _COUNTS, rows, seen, status)
            good = 0
    for rank in range(0, WORLD_SIZE):
        came = tl.load(header + ranks * stride + rank * EXPERTS + experts, mask=inside, other=0)
        rows_here = tl.sum(tl.sum(came.to(tl.int64), 1), 0)
        if (good == 1) & (rows_here > capacity):
            seen = tl.minimum(rows_here, 2147483647).to(tl.int32)
            refuse_release_sys(pad, _KINDS * rank + _CAPACITY, capacity, seen, status)
            good = 0
    return good


@triton.jit
def _place_received(
    header, owner, source,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Where rank `owner` has each expert's rows of rank `source`: sorted by (expert, source)."""
    ranks = tl.arange(0, BLOCK_R)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    inside = (ranks < WORLD_SIZE) & (experts < EXPERTS)
    at = header + ranks * (WORLD_SIZE * EXPERTS + 1) + owner * EXPERTS + experts
    came = tl.load(at, mask=inside, other=0)
    of_expert = tl.sum(came, 0)
    before = tl.sum(tl.where(ranks < source, came, 0), 0)
    return tl.cumsum(of_expert, 0) - of_expert + before


@triton.jit
def _place_sent(
    header, source, owner,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Where rank `source` has its rows for each expert of rank `owner`: sorted by (owner,
    expert).
    """
    ranks = tl.arange(0, BLOCK_R)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    sent = header + source * (WORLD_SIZE * EXPERTS + 1)
    inside = (ranks < owner) & (experts < EXPERTS)
    earlier = tl.load(sent + ranks * EXPERTS + experts, mask=inside, other=0)
    lanes = tl.arange(0, BLOCK_E)
    here = tl.load(sent + owner * EXPERTS + lanes, mask=lanes < EXPERTS, other=0)
    return tl.sum(tl.sum(earlier, 1), 0) + tl.cumsum(here, 0) - here


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "rows", "capacity"])
def exchange_counts_kernel(
    counts, routes, received, pointers, pad, pad_pointers, status, rank, epoch,
    timeout_ns: tl.int64, rows, capacity,
    BLOCK_M: tl.constexpr, WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, ROWS: tl.constexpr,
    ARRIVALS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    lanes = tl.arange(0, BLOCK_G)
    mine = tl.load(counts + lanes, mask=lanes < groups, other=0)
    for step in range(0, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        theirs = tl.load(pointers + peer).to(counts.dtype) + rank * (groups + 1)
        tl.store(theirs + lanes, mine, mask=lanes < groups)
        tl.store(theirs + groups, rows)
        their_pad = tl.load(pad_pointers + peer).to(pad.dtype)
        signal_release_sys(their_pad, rank * MAX_COMM_TILES, epoch)  # signal [X]
    for source in range(0, WORLD_SIZE):
        wait_acquire_sys(pad, source * MAX_COMM_TILES, epoch, deadline, status)  # wait [X]
    header = tl.load(pointers + rank).to(counts.dtype)
    good = _check_counts(header, pad, status, capacity, WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E)
    experts = tl.arange(0, BLOCK_E)
    inside = experts < EXPERTS
    recv_tiles = 0
    send_tiles = 0
    recv_rows = 0
    for step in range(0, WORLD_SIZE):
        at = step * EXPERTS + experts
        # what rank + step sends here
        peer = (rank + step) % WORLD_SIZE
        came = tl.load(header + peer * (groups + 1) + rank * EXPERTS + experts, mask=inside)
        came = tl.where(inside, came * good, 0)
        tiles = tl.cdiv(came, BLOCK_M)
        first = recv_tiles + tl.cumsum(tiles, 0) - tiles
        recv_tiles += tl.sum(tiles, 0)
        recv_rows += tl.sum(came, 0)
        place = _place_received(header, rank, peer, WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E)
        there = _place_sent(header, peer, rank, WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E)
        tl.store(field(routes, RECV_TILE, groups) + at, first, mask=inside)
        tl.store(field(routes, RECV_ROW, groups) + at, place, mask=inside)
        tl.store(field(routes, RECV_COUNT, groups) + at, came, mask=inside)
        tl.store(field(routes, RECV_REMOTE_ROW, groups) + at, there, mask=inside)
        tl.store(received + peer * EXPERTS + experts, came, mask=inside)
        # what goes from here to rank - step
        peer = (rank + WORLD_SIZE - step) % WORLD_SIZE
        sent = tl.load(header + rank * (groups + 1) + peer * EXPERTS + experts, mask=inside)
        sent = tl.where(inside, sent * good, 0)
        tiles = tl.cdiv(sent, ROWS)
        first = send_tiles + tl.cumsum(tiles, 0) - tiles
        send_tiles += tl.sum(tiles, 0)
        place = _place_sent(header, rank, peer, WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E)
        there = _place_received(header, peer, rank, WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E)
        tl.store(field(routes, SEND_TILE, groups) + at, first, mask=inside)
        tl.store(field(routes, SEND_ROW, groups) + at, place, mask=inside)
        tl.store(field(routes, SEND_COUNT, groups) + at, sent, mask=inside)
        tl.store(field(routes, SEND_REMOTE_ROW, groups) + at, there, mask=inside)
        if step == 0:
            tl.store(word(routes, OWN_RECV_TILES, groups), recv_tiles)
            tl.store(word(routes, OWN_SEND_TILES, groups), send_tiles)
    tl.store(word(routes, DRAWS, groups), 0)
    tl.store(word(routes, MORE_DRAWS, groups), 0)
    tl.store(word(routes, RECV_TILES, groups), recv_tiles)
    tl.store(word(routes, RECV_ROWS, groups), recv_rows)
    tl.store(word(routes, SEND_TILES, groups), send_tiles)
    arrived = tl.arange(0, BLOCK_G)
    tl.store(word(routes, WORDS, groups) + arrived, 0, mask=arrived < ARRIVALS)
