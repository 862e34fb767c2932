"""GEMM+AR and GEMM+RS of few rows (decode) in one kernel, with flags in the data.

gemv_ar_kernel  one list of work tiles a rank, drawn in order:
                1. GEMM tiles, all rows of some columns, or parts of them along K: the partial goes
                   to all ranks as words; GEMM+RS: to each rank its rows
                2. two phases only: the owner of a tile sums its partials, and sends the sum to all
                3. every tile of y: the fp32 sum of its partials in rank order, or the owner's sum
                A sum has as many columns as a CTA can hold words of all ranks in registers.

Words have their epoch with them (`word_primitives`), so there are no signals and no barriers. A
section waits only for earlier sections, of any rank, and a CTA comes to a section when all of
the earlier ones have been drawn: one resident CTA a rank suffices.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from flux_megatron.kernels import launch
from flux_megatron.kernels.few_rows.words import (
    RENEW_EVERY,
    WORK_WORDS,
    product,
    registers_of,
    renew,
    send_to,
    send_to_all,
    tile_words,
)
from flux_megatron.kernels.portable.gemm_tile import store_tile, w_operand
from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import deadline_after
from flux_megatron.kernels.sizes import (
    cdiv,
    next_power_of_2,
    partial_sums,
    rows_of,
    values_in_word,
)
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.kernels.word_primitives import pack_words, receive_sum, send_words
from flux_megatron.problem import Problem, Tile
from flux_megatron.symm import signals
from flux_megatron.symm.program import Memory, Number

MOST_ROWS = 128
WORDS_A_THREAD = 32  # of all ranks, in flight; 64 do not fit in registers
LEAST_COLUMNS = 16  # of a sum: 64 bytes of words side by side


def supports(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    if problem.M > MOST_ROWS:
        return f"{problem.M} rows given, {MOST_ROWS} at most expected"
    return launch.supports(problem)


def half_bytes(M: int, N: int, dtype: torch.dtype, world_size: int) -> int:
    """What one call of GEMM+AR stores on each rank: the words of all partials, and of the sums;
    GEMM+RS stores less.
    """
    return (world_size + 1) * M * cdiv(N, values_in_word(dtype.itemsize)) * 8


def sum_columns(tile: Tile, rows: int, values: int) -> int:
    """Columns of a sum of so many rows, those of all ranks; `values` are in a word."""
    words = WORDS_A_THREAD * 32 * tile.num_warps
    fitting = 1 << max(1, words * values // rows).bit_length() - 1
    return min(tile.block_n, max(LEAST_COLUMNS, fitting))


@triton.jit
def send_to_owners(
    word_pointers, first, at, y_rows, slot_words, words, inside,
    BLOCK_M: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Each row to the rank whose it is, in a slot that begins at `first`; `at` are places among all
    rows.

    One load of a pointer a row would decide which words a warp stores: with as many rows as threads
    Triton made it a word of each of 32 rows, and a call took 20 us longer.
    """
    owner = tl.arange(0, BLOCK_M)[:, None] // y_rows
    theirs = tl.zeros((BLOCK_M, 1), dtype=tl.int64)
    for peer in tl.static_range(WORLD_SIZE):
        theirs = tl.where(owner == peer, tl.load(word_pointers + peer), theirs)
    places = theirs.to(word_pointers.dtype) + (first - owner * slot_words) + at
    send_words(places, words, inside)  # signal [W]


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "half_words", "timeout_ns"])
def gemv_ar_kernel(
    x, w, y, partials, word_pointers, epochs, work, counters, status, rank,
    half_words: tl.int64, timeout_ns: tl.int64, M, N, K,
    WORLD_SIZE: tl.constexpr, TWO_PHASE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_N: tl.constexpr, SUM_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, SCATTERS: tl.constexpr, PARTS: tl.constexpr, VALUES: tl.constexpr,
    TMA: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    epoch = tl.load(epochs) + 1
    parity = epoch & 1
    work += parity * WORK_WORDS  # so a CTA has read the epoch before it draws
    dtype: tl.constexpr = y.dtype.element_ty
    memory = tl.load(word_pointers + rank)
    mine = memory.to(word_pointers.dtype)
    half = mine + parity * half_words
    y_rows = M // WORLD_SIZE if SCATTERS else M
    slot_words = tl.cast(y_rows, tl.int64) * tl.cdiv(N, VALUES)
    tiles = tl.cdiv(N, BLOCK_N)
    parts = tiles * PARTS
    slices: tl.constexpr = BLOCK_N // SUM_N
    owned = tl.cdiv(tiles - rank, WORLD_SIZE) * slices if TWO_PHASE else 0
    sums = tl.cdiv(N, SUM_N)
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    tile = first_tile(work)
    while tile < parts:
        ticket = begin_draw(work, NUM_WARPS)
        made = tile // PARTS
        acc, whole = product(
            x, right, tile, partials, counters, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA, PARTS,
        )  # fmt: skip
        if whole:
            words = pack_words(acc.to(dtype), epoch, VALUES)
            at, inside = tile_words(made, M, N, BLOCK_M, BLOCK_N, VALUES)
            if (made == 0) & ((epoch & (RENEW_EVERY - 1)) < 2):
                renew(mine + (1 - parity) * half_words, half_words, epoch - 1, 1024)
            first = parity * half_words + rank * slot_words
            if SCATTERS:
                send_to_owners(
                    word_pointers, first, at, y_rows, slot_words, words, inside, BLOCK_M, WORLD_SIZE
                )
            elif TWO_PHASE:
                send_to(word_pointers, made % WORLD_SIZE, first + at, words, inside)
            else:
                send_to_all(word_pointers, rank, first + at, words, inside, WORLD_SIZE)
        tile = settle(end_draw(ticket), work)
    if TWO_PHASE:
        while tile < parts + owned:
            ticket = begin_draw(work, NUM_WARPS)
            mine_to_sum = rank + (tile - parts) // slices * WORLD_SIZE
            columns = mine_to_sum * slices + (tile - parts) % slices
            at, inside = tile_words(columns, M, N, BLOCK_M, SUM_N, VALUES)
            total = receive_sum(
                half, at, inside, slot_words, epoch, 0, deadline, status, memory,
                dtype, WORLD_SIZE, VALUES,
            )  # fmt: skip  # wait [W]
            words = pack_words(total.to(dtype), epoch, VALUES)
            at += parity * half_words + WORLD_SIZE * slot_words
            send_to_all(word_pointers, rank, at, words, inside, WORLD_SIZE)
            tile = settle(end_draw(ticket), work)
    everything = parts + owned + sums
    while tile < everything:
        ticket = begin_draw(work, NUM_WARPS)
        columns = tile - parts - owned
        at, inside = tile_words(columns, y_rows, N, BLOCK_Y, SUM_N, VALUES)
        if TWO_PHASE:
            total = receive_sum(
                half + WORLD_SIZE * slot_words, at, inside, slot_words, epoch,
                columns // slices % WORLD_SIZE, deadline, status, memory, dtype, 1, VALUES,
            )  # fmt: skip  # wait [W]
        else:
            total = receive_sum(
                half, at, inside, slot_words, epoch, 0, deadline, status, memory,
                dtype, WORLD_SIZE, VALUES,
            )  # fmt: skip  # wait [W]
        store_tile(y, total, 0, columns * SUM_N, y_rows, N, BLOCK_Y, SUM_N, False)
        tile = settle(end_draw(ticket), work)
    close_draws(tile, everything, work)
    if tile == everything + tl.num_programs(0) - 1:
        tl.store(epochs, epoch)  # the last draw in vain: every CTA has read it


def gemv_ar(
    x: Memory, w: Memory, *, word_pointers: Memory, half_words: Number, epochs: Memory,
    work: Memory, counters: Memory, status: Memory, rank: int, world_size: int, timeout_ns: int,
    layout: str, tile: Tile, parts: int = 1, two_phase: bool = False, scatters: bool = False,
) -> Memory:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]), summed over the ranks: y [M, N], the same on all; or, if
    it `scatters`, this rank's rows [M / R, N].

    `word_pointers` [R] has the addresses of all ranks' words, two halves of `half_words` each;
    `epochs` [1] and `work` belong to them, as `symm.word_channel` says. K is cut into `parts`,
    which `counters` count.
    """
    M, K = x.shape
    N = w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(M // world_size if scatters else M, N)
    partials = x
    if parts > 1:
        partials = x.new_empty(*partial_sums(M, N, tile, parts), dtype=torch.float32)
    tile = launch.without_tma_if_unaligned(replace(tile, block_m=rows_of(M)), (K, N), x, w)
    block_y = next_power_of_2(M // world_size) if scatters else tile.block_m
    values = values_in_word(x.dtype.itemsize)
    work_tiles = cdiv(N, tile.block_n) * parts
    if x.device.type == "cpu":
        grid = launch.persistent_grid(x.device, work_tiles)
    else:  # more than one CTA fits on an SM
        grid = (min(work_tiles, signals.WORK_WORDS - signals.WORK_CLAIMS),)
    launch_kernel(
        gemv_ar_kernel, grid, tile,
        (x, w, y, partials, word_pointers, epochs, work, counters, status),
        (rank, half_words, timeout_ns), (M, N, K),
        registers=registers_of(tile, work_tiles, layout, x.dtype, x.device),
        WORLD_SIZE=world_size, TWO_PHASE=two_phase, BLOCK_Y=block_y,
        SUM_N=sum_columns(tile, block_y * world_size, values), LAYOUT_NN=layout == "nn",
        SCATTERS=scatters, PARTS=parts, VALUES=values,
    )  # fmt: skip
    return y
