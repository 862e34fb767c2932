"""What the kernels of few rows share (`gemv_ar`, `ag_gemv`): tiles as words, tiles whose K is cut
into parts, and how many registers a thread may have.

Words lie in memory of all ranks. A call has a half of every rank's memory, in slots; a slot is a
matrix [M, N / VALUES] of words.

Parts of K are multiplied by CTAs side by side (split-K). Each part leaves its fp32 sums in memory
and is counted; the CTA that counts the last part of a tile adds them up in the order of the parts,
so the bits do not depend on who comes last. Nobody waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper.config import SHARED_BYTES
from flux_megatron.kernels.portable.gemm_tile import gemm_tile_part
from flux_megatron.kernels.primitives import count_acq_rel_gpu
from flux_megatron.kernels.shared_memory import HOPPER, MMA_SYNC_ROWS, stages_bytes
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.word_primitives import fence_sys, send_words
from flux_megatron.problem import Tile
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


@triton.jit
def product(
    x, w, work_tile, partials, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUT_NN: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of all rows, fp32 [BLOCK_M, BLOCK_N], and True; for a part whose tile still lacks
    others anything and False. The tile is `work_tile` // PARTS.
    """
    tile, part = work_tile // PARTS, work_tile % PARTS
    acc = gemm_tile_part(
        x, w, 0, tile * BLOCK_N, part, PARTS, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, LAYOUT_NN, TMA
    )
    whole = part >= 0
    if PARTS > 1:
        acc, whole = sum_of_parts(acc, tile, part, partials, counters, M, BLOCK_M, BLOCK_N, PARTS)
    return acc, whole


@triton.jit
def sum_of_parts(
    acc, tile, part, partials, counters, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Leave a part's sums; for the last that comes the sum of all and True, else anything and
    False. `partials`, fp32 [tiles, PARTS, BLOCK_M, BLOCK_N], has the first M rows of each part.
    """
    rows = tl.arange(0, BLOCK_M)[:, None]
    at = rows * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    partials += tile * (PARTS * BLOCK_M * BLOCK_N)
    tl.store(partials + part * (BLOCK_M * BLOCK_N) + at, acc, mask=rows < M)
    last = count_acq_rel_gpu(counters + tile, PARTS)  # count [C]
    if last:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for one in tl.static_range(PARTS):
            # past L1: other SMs have stored them
            acc += tl.load(
                partials + one * (BLOCK_M * BLOCK_N) + at, mask=rows < M, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
    return acc, last


OF_AN_SM, OF_A_THREAD = 1 << 16, 255
RESERVED_BYTES = 1 << 10  # of shared memory, by CUDA, for each CTA


def registers_of(
    tile: Tile, work_tiles: int, layout: str, dtype: torch.dtype, device: torch.device
) -> int:
    """How many registers a thread may have: as many as let those CTAs on an SM at once that its
    shared memory holds and `work_tiles` need. 0, the compiler's choice, where more were no faster,
    or not measured.

    Up to 32 rows Triton multiplies by mma.sync, which takes its operands from registers. Left
    alone, ptxas often limits a thread to 96 or 128 of them, spills some, and loads an operand right
    before its product: up to 14 % of a call.
    """
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return 0
    if tile.block_m > MMA_SYNC_ROWS or layout != "nt" or dtype.itemsize != 2:
        return 0
    cta_bytes = stages_bytes(tile, dtype.itemsize, HOPPER) + RESERVED_BYTES
    fitting = max(1, SHARED_BYTES // cta_bytes)
    resident = min(fitting, cdiv(work_tiles, launch.sms(device)))
    return min(OF_A_THREAD, OF_AN_SM // (resident * tile.num_warps * 32) // 8 * 8)
