"""Rows of tokens between a rank and those of its experts, once for each rank (`token_routes`).

send_tokens_kernel     pushes: tokens of a rank that has experts of theirs go to their place in its
                       region [R sources, T, K], and the last ones of a signal raise [Y] there. Then
                       every token that is here or comes, after [Y], is copied to its rows
return_tokens_kernel   sums: the rows of another rank's token, in fp32 and in the order of experts,
                       go rounded to its region [R owners, T, N], and raise [Z] there. Then this
                       rank's own tokens: waits [Z] of every rank, and adds up in rank order

Each is the other's backward. CTAs draw tiles of ROWS tokens. All tiles that wait for nobody come
first, so one resident CTA is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    count_acq_rel_gpu,
    deadline_after,
    signal_release_sys,
    wait_acquire_sys,
)


@triton.jit
def _announce(counters, pad_pointers, number, blocks, per_signal, peer, rank, epoch):
    """Count a tile of tokens; the last of its signal tells `peer`."""
    signal = number // per_signal
    arrivals = tl.minimum(blocks - signal * per_signal, per_signal)
    if count_acq_rel_gpu(counters + peer * MAX_COMM_TILES + signal, arrivals):
        pad = tl.load(pad_pointers + peer).to(counters.dtype)
        signal_release_sys(pad, rank * MAX_COMM_TILES + signal, epoch)  # signal [Y] [Z]


@triton.jit
def _push(x, sent, region, tokens, T, K, peer, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tokens of a tile that `peer` wants, to their places in its region."""
    ranks = tl.load(sent + tokens, mask=tokens < T, other=0)
    wanted = (ranks >> peer) & 1
    rows = tokens[:, None].to(tl.int64) * K
    for first in range(0, K, COLUMNS):
        cols = first + tl.arange(0, COLUMNS)
        inside = (wanted[:, None] != 0) & (cols[None, :] < K)
        at = rows + cols[None, :]
        tl.store(region + at, tl.load(x + at, mask=inside), mask=inside)


@triton.jit
def _spread(x, rows, places, tokens, T, K, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each token of a tile to all of its rows."""
    for first in range(0, K, COLUMNS):
        cols = first + tl.arange(0, COLUMNS)
        any_place = tl.load(places + tokens * SLOTS, mask=tokens < T, other=-1)
        inside = (any_place[:, None] >= 0) & (cols[None, :] < K)
        value = tl.load(x + tokens[:, None].to(tl.int64) * K + cols[None, :], mask=inside)
        for slot in tl.static_range(SLOTS):
            row = tl.load(places + tokens * SLOTS + slot, mask=tokens < T, other=-1)
            at = row[:, None].to(tl.int64) * K + cols[None, :]
            tl.store(rows + at, value, mask=(row[:, None] >= 0) & (cols[None, :] < K))


@triton.jit
def _summed(
    rows, places, tokens, cols, T, N, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The fp32 sum of each token's rows in the order of experts, rounded once."""
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(places + tokens * SLOTS + slot, mask=tokens < T, other=-1)
        at = row[:, None].to(tl.int64) * N + cols[None, :]
        inside = (row[:, None] >= 0) & (cols[None, :] < N)
        acc += tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    return acc.to(rows.dtype.element_ty)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "T", "blocks", "per_signal"])
def send_tokens_kernel(
    x, rows, places, sent, counters, work, pointers, pad, pad_pointers, status, rank, epoch,
    timeout_ns: tl.int64, T, blocks, per_signal, K,
    WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    pushes = (WORLD_SIZE - 1) * blocks
    tiles = pushes + WORLD_SIZE * blocks
    tile = first_tile(work)
    while tile < tiles:
        ticket = begin_draw(work, NUM_WARPS)  # awaited when these rows are stored
        if tile < pushes:
            number = tile % blocks
            peer = (rank + WORLD_SIZE - 1 - tile // blocks) % WORLD_SIZE
            tokens = number * ROWS + tl.arange(0, ROWS)
            region = tl.multiple_of(tl.load(pointers + peer).to(x.dtype), 16)
            region += rank.to(tl.int64) * T * K
            _push(x, sent, region, tokens, T, K, peer, ROWS, COLUMNS)
            _announce(counters, pad_pointers, number, blocks, per_signal, peer, rank, epoch)
        else:
            number = (tile - pushes) % blocks
            step = (tile - pushes) // blocks
            source = (rank + step) % WORLD_SIZE
            tokens = number * ROWS + tl.arange(0, ROWS)
            came = x
            if step != 0:
                slot = source * MAX_COMM_TILES + number // per_signal
                wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [Y]
                came = tl.multiple_of(tl.load(pointers + rank).to(x.dtype), 16)
                came += source.to(tl.int64) * T * K
            _spread(came, rows, places + source.to(tl.int64) * T * SLOTS, tokens, T, K, SLOTS,
                    COLUMNS)  # fmt: skip
        tile = settle(end_draw(ticket), work)
    close_draws(tile, tiles, work)


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "T", "blocks", "per_signal"])
def return_tokens_kernel(
    rows, y, places, sent, counters, work, pointers, pad, pad_pointers, status, rank, epoch,
    timeout_ns: tl.int64, T, blocks, per_signal, N,
    WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    remote = (WORLD_SIZE - 1) * blocks
    tiles = remote + blocks
    tile = first_tile(work)
    while tile < tiles:
        ticket = begin_draw(work, NUM_WARPS)  # awaited when these rows are stored
        number = tile % blocks
        tokens = number * ROWS + tl.arange(0, ROWS)
        at_token = tokens[:, None].to(tl.int64) * N
        if tile < remote:
            source = (rank + 1 + tile // blocks) % WORLD_SIZE
            mine = places + source.to(tl.int64) * T * SLOTS
            region = tl.multiple_of(tl.load(pointers + source).to(rows.dtype), 16)
            region += rank.to(tl.int64) * T * N
            has_rows = tl.load(mine + tokens * SLOTS, mask=tokens < T, other=-1)
            for first in range(0, N, COLUMNS):
                cols = first + tl.arange(0, COLUMNS)
                part = _summed(rows, mine, tokens, cols, T, N, SLOTS, ROWS, COLUMNS)
                inside = (has_rows[:, None] >= 0) & (cols[None, :] < N)
                tl.store(region + at_token + cols[None, :], part, mask=inside)
            _announce(counters, pad_pointers, number, blocks, per_signal, source, rank, epoch)
        else:
            for step in range(1, WORLD_SIZE):
                slot = (rank + step) % WORLD_SIZE * MAX_COMM_TILES + number // per_signal
                wait_acquire_sys(pad, slot, epoch, deadline, status)  # wait [Z]
            mine = places + rank.to(tl.int64) * T * SLOTS
            region = tl.multiple_of(tl.load(pointers + rank).to(rows.dtype), 16)
            ranks = tl.load(sent + tokens, mask=tokens < T, other=0)
            for first in range(0, N, COLUMNS):
                cols = first + tl.arange(0, COLUMNS)
                total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                for owner in range(0, WORLD_SIZE):
                    if owner == rank:
                        part = _summed(rows, mine, tokens, cols, T, N, SLOTS, ROWS, COLUMNS)
                    else:
                        inside = (((ranks >> owner) & 1) != 0)[:, None] & (cols[None, :] < N)
                        came = region + owner * (T.to(tl.int64) * N) + at_token + cols[None, :]
                        part = tl.load(came, mask=inside, other=0.0)
                    total += part.to(tl.float32)
                inside = (tokens[:, None] < T) & (cols[None, :] < N)
                tl.store(y + at_token + cols[None, :], total.to(y.dtype.element_ty), mask=inside)
        tile = settle(end_draw(ticket), work)
    close_draws(tile, tiles, work)
