"""Tiles as words, in the memory that the kernels of few rows share (`gemv_ar`, `ag_gemv`).

A call has a half of every rank's memory, in slots; a slot is a matrix [M, N / VALUES] of words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flux_megatron.kernels.word_primitives import fence_sys, send_words
from flux_megatron.symm import signals

# Epochs have 32 bits: words that no call has stored for 2**32 calls would look new. So the other
# half's words are renewed in two calls, one for each half, out of so many.
RENEW_EVERY = tl.constexpr(2**30)
WORK_WORDS = tl.constexpr(signals.WORK_WORDS)  # of the tile scheduler of a half


@triton.jit
def tile_words(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr):
    """Where the words of a tile lie in a slot [M, N / VALUES], and which of them there are."""
    row_words = tl.cdiv(N, VALUES)
    rows = tl.arange(0, BLOCK_M)
    cols = tile * (BLOCK_N // VALUES) + tl.arange(0, BLOCK_N // VALUES)
    inside = (rows[:, None] < M) & (cols[None, :] < row_words)
    return rows[:, None] * row_words + cols[None, :], inside


@triton.jit
def renew(words, count, epoch, BLOCK: tl.constexpr):
    """Mark `count` words of this rank as those of `epoch`, before anything else is sent."""
    lanes = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        at = first + lanes
        tl.store(
            words + at, tl.full((BLOCK,), 0, tl.int64) + (epoch.to(tl.int64) << 32), at < count
        )
    fence_sys()


@triton.jit
def send_to(word_pointers, peer, at, words, inside):
    """Store words at the places `at` of the peer's memory."""
    theirs = tl.load(word_pointers + peer).to(word_pointers.dtype)
    send_words(theirs + at, words, inside)  # signal [W]


@triton.jit
def send_to_all(word_pointers, rank, at, words, inside, WORLD_SIZE: tl.constexpr):
    """The same for every rank, this one last."""
    for step in tl.static_range(1, WORLD_SIZE + 1):
        send_to(word_pointers, (rank + step) % WORLD_SIZE, at, words, inside)
