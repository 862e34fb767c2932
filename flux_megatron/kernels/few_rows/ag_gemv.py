"""AG+GEMM of few rows (decode) in one kernel, with flags in the data.

ag_gemv_kernel  one list of work tiles a rank, drawn in order:
                1. pieces of x, all rows and some columns, go to all ranks as words
                2. every rank's pieces become rows of the gathered x, and are counted [H]
                3. GEMM tiles, all rows of some columns of y, once all pieces are there

The words, and why one resident CTA a rank suffices, are those of `gemv_ar`. Rows go through memory
once more, because every GEMM tile reads all of them, and words are twice as long.
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
    send_to_all,
    tile_words,
)
from flux_megatron.kernels.portable.gemm_tile import store_tile, w_operand
from flux_megatron.kernels.portable.tile_draws import begin_draw, close_draws, end_draw
from flux_megatron.kernels.primitives import (
    acquire_for_tma_loads,
    count_acq_rel_gpu,
    count_release_sys,
    deadline_after,
    wait_acquire_sys,
)
from flux_megatron.kernels.sizes import (
    cdiv,
    next_power_of_2,
    partial_sums,
    rows_of,
    values_in_word,
)
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.kernels.word_primitives import pack_pairs, pack_words, receive_sum
from flux_megatron.problem import Tile
from flux_megatron.symm import signals
from flux_megatron.symm.program import Memory, Number

PIECE = 2048  # values of x: 8 words a thread; of more rows than that twice as many
PIECE_ROWS = 64
_ARRIVED, _LEFT = tl.constexpr(0), tl.constexpr(1)


def half_bytes(M: int, K: int, dtype: torch.dtype) -> int:
    """What one call stores on each rank: the words of all rows."""
    return M * cdiv(K, values_in_word(dtype.itemsize)) * 8


def piece_columns(M_shard: int, world_size: int, K: int, values: int) -> int:
    """Columns of a piece, which has all rows of a shard; `values` are in a word."""
    piece = PIECE if world_size * M_shard <= PIECE_ROWS else 2 * PIECE
    return max(values, min(piece // next_power_of_2(M_shard), next_power_of_2(K)))


@triton.jit
def load_words(
    x, piece, M, K, epoch, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr
):
    """A piece of x as words, where they lie among the shard's, and which of them there are.

    A thread loads what one word holds, and a warp neighbouring words: with 16 bytes a thread would
    have several, and each store of a warp write a part of every 32 bytes.
    """
    row_words: tl.constexpr = COLUMNS // VALUES
    number = tl.arange(0, ROWS * row_words)
    row, word = number // row_words, piece * row_words + number % row_words
    cols = word[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    inside = (row[:, None] < M) & (cols < K)
    values = tl.load(x + row[:, None] * K + cols, mask=inside, other=0.0)
    if VALUES == 2:
        words = pack_pairs(values, epoch)
    else:
        words = tl.reshape(pack_words(values, epoch, VALUES), (ROWS * row_words,))
    at = row * tl.cdiv(K, VALUES) + word
    return words, at, (row < M) & (word < tl.cdiv(K, VALUES))


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "half_words", "timeout_ns"])
def ag_gemv_kernel(
    x, gathered, w, bias, y, partials, word_pointers, epochs, work, arrivals, counters, status,
    rank, half_words: tl.int64, timeout_ns: tl.int64, M_shard, N, K,
    WORLD_SIZE: tl.constexpr, SHARD_ROWS: tl.constexpr, PIECE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    LAYOUT_NN: tl.constexpr, PARTS: tl.constexpr, VALUES: tl.constexpr, TMA: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    epoch = tl.load(epochs) + 1
    parity = epoch & 1
    work += parity * WORK_WORDS  # so a CTA has read the epoch before it draws
    dtype: tl.constexpr = x.dtype.element_ty
    memory = tl.load(word_pointers + rank)
    mine = memory.to(word_pointers.dtype)
    half = mine + parity * half_words
    slot_words = tl.cast(M_shard, tl.int64) * tl.cdiv(K, VALUES)
    pieces = tl.cdiv(K, PIECE_COLUMNS)
    arriving = WORLD_SIZE * pieces
    tiles = tl.cdiv(N, BLOCK_N)
    right = w_operand(w, N, K, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA)
    # not the tile of its own number: a CTA that begins in a later section can draw no earlier one
    tile = end_draw(begin_draw(work, NUM_WARPS))
    while tile < pieces:
        ticket = begin_draw(work, NUM_WARPS)
        words, at, inside = load_words(
            x, tile, M_shard, K, epoch, SHARD_ROWS, PIECE_COLUMNS, VALUES
        )
        if (tile == 0) & ((epoch & (RENEW_EVERY - 1)) < 2):
            renew(mine + (1 - parity) * half_words, half_words, epoch - 1, 1024)
        at += parity * half_words + rank * slot_words
        send_to_all(word_pointers, rank, at, words, inside, WORLD_SIZE)
        tile = end_draw(ticket)
    while tile < pieces + arriving:
        ticket = begin_draw(work, NUM_WARPS)
        source = (rank + (tile - pieces) // pieces) % WORLD_SIZE
        piece = (tile - pieces) % pieces
        at, inside = tile_words(piece, M_shard, K, SHARD_ROWS, PIECE_COLUMNS, VALUES)
        values = receive_sum(
            half + source * slot_words, at, inside, slot_words, epoch, source, deadline, status,
            memory, dtype, 1, VALUES,
        )  # fmt: skip  # wait [W]
        rows = gathered + source.to(tl.int64) * M_shard * K
        store_tile(
            rows, values, 0, piece * PIECE_COLUMNS, M_shard, K, SHARD_ROWS, PIECE_COLUMNS, False
        )
        count_release_sys(arrivals + _ARRIVED)  # count [H]
        tile = end_draw(ticket)
    everything = pieces + arriving + tiles * PARTS
    while tile < everything:
        part = tile - pieces - arriving
        col = part // PARTS * BLOCK_N
        # a later deadline: rows that lack are rows whose words lack, and that wait names the rank
        wait_acquire_sys(arrivals, _ARRIVED, arriving, deadline + timeout_ns, status)  # wait [H]
        if TMA:
            acquire_for_tma_loads()
        M = WORLD_SIZE * M_shard
        acc, whole = product(
            gathered, right, part, partials, counters, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA, PARTS,
        )  # fmt: skip
        # only now: a CTA that waits must not keep the next tile from others
        ticket = begin_draw(work, NUM_WARPS)
        if whole:
            if HAS_BIAS:
                cols = col + tl.arange(0, BLOCK_N)
                acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            store_tile(y, acc, 0, col, M, N, BLOCK_M, BLOCK_N, False)
        tile = end_draw(ticket)
    close_draws(tile, everything, work)
    if tile == everything + tl.num_programs(0) - 1:
        tl.store(epochs, epoch)  # the last draw in vain: every CTA has read it
    if count_acq_rel_gpu(arrivals + _LEFT, tl.num_programs(0)):
        tl.store(arrivals + _ARRIVED, 0)  # the last CTA to leave: none waits any more


def ag_gemv(
    x: Memory, gathered: Memory, w: Memory, bias: Memory | None, *, word_pointers: Memory,
    half_words: Number, epochs: Memory, work: Memory, arrivals: Memory, counters: Memory,
    status: Memory, rank: int, timeout_ns: int, layout: str, tile: Tile, parts: int = 1,
) -> Memory:  # fmt: skip
    """All ranks' x [M_shard, K], which it leaves in `gathered` [M, K], times w ([N, K] or [K, N])
    + bias [N]: y [M, N].

    `word_pointers` [R] has the addresses of all ranks' words, two halves of `half_words` each;
    `epochs` [1], `work` and `arrivals` [2] belong to them, as `symm.word_channel` says. K is cut
    into `parts`, which `counters` count.
    """
    M, (M_shard, K) = len(gathered), x.shape
    N = w.shape[0] if layout == "nt" else w.shape[1]
    y, partials = x.new_empty(M, N), x
    if parts > 1:
        partials = x.new_empty(*partial_sums(M, N, tile, parts), dtype=torch.float32)
    world_size, values = M // M_shard, values_in_word(x.dtype.itemsize)
    columns = piece_columns(M_shard, world_size, K, values)
    tile = launch.without_tma_if_unaligned(replace(tile, block_m=rows_of(M)), (K, N), gathered, w)
    work_tiles = cdiv(N, tile.block_n) * parts
    # As many CTAs as GEMM tiles, or one an SM for the pieces: with more, an SM would make two tiles
    # where another makes none.
    (grid,) = launch.persistent_grid(x.device, world_size * cdiv(K, columns))
    if x.device.type != "cpu":
        grid = min(max(grid, work_tiles), signals.WORK_WORDS - signals.WORK_CLAIMS)
    launch_kernel(
        ag_gemv_kernel, (grid,), tile,
        (
            x, gathered, w, bias if bias is not None else x, y, partials, word_pointers, epochs,
            work, arrivals, counters, status,
        ),
        (rank, half_words, timeout_ns), (M_shard, N, K),
        registers=registers_of(tile, work_tiles, layout, x.dtype, x.device),
        WORLD_SIZE=world_size, SHARD_ROWS=next_power_of_2(M_shard), PIECE_COLUMNS=columns,
        HAS_BIAS=bias is not None, LAYOUT_NN=layout == "nn", PARTS=parts, VALUES=values,
    )  # fmt: skip
    return y
