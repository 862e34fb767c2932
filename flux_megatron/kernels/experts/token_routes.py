"""Which rows a token has where it travels once to a rank: ranks tell each other which experts each
token has chosen, and each finds the places of rows sorted by its experts.

    exchange_choices   stores this rank's choices and weights in the header of every rank, and how
                       many rows each of all experts gets; the last CTA signals [X]
    place_rows         waits [X] of every rank, checks all counts, and writes the places

A rank's **places** are int32 [R sources, T, SLOTS]: for each token of a source, in the order of
experts, the rows of those that it has chosen here, then -1. Rows are sorted by (expert, source,
token); with `reverse` the last expert's come first. All ranks check the same numbers, so all refuse
the same call: then all places are -1 and all experts without rows.
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

COUNTS = tl.constexpr(8192)  # that a CTA adds up at once: 32 of a thread, for any number of tokens
NOBODY = tl.constexpr(-1)  # instead of a weight's bits, or of a row
_NAN = tl.constexpr(0x7FC00000)
_CAPACITY = tl.constexpr(signals.REFUSED_CAPACITY)
_CHOICES = tl.constexpr(signals.REFUSED_CHOICES)
_KINDS = tl.constexpr(signals.REFUSED_KINDS)


@triton.jit
def _counts_at(header, source, block, blocks, WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """Where a source's counts [blocks, E] for this rank's experts begin, from a block on."""
    totals: tl.constexpr = WORLD_SIZE * (WORLD_SIZE * EXPERTS + 1)
    return header + totals + (source * blocks + block) * EXPERTS


@triton.jit
def _words_at(header, source, T, blocks, WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """Where a source's words [T, E] for this rank's experts begin."""
    counts = _counts_at(header, WORLD_SIZE, 0, blocks, WORLD_SIZE, EXPERTS)
    return counts + source.to(tl.int64) * T * EXPERTS


@triton.jit
def _first_counts(counts, stride, blocks, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Per expert, the sum of the first `blocks` rows of counts [., E], which are `stride` apart."""
    lanes = tl.arange(0, COUNTS // BLOCK_E)
    experts = tl.arange(0, BLOCK_E)
    found = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, blocks, COUNTS // BLOCK_E):
        row = first + lanes
        inside = (row[:, None] < blocks) & (experts[None, :] < EXPERTS)
        rows = tl.load(counts + row[:, None] * stride + experts[None, :], mask=inside, other=0)
        found += tl.sum(rows, 0)
    return found


@triton.jit(do_not_specialize=["rank", "epoch", "T", "blocks", "topk"])
def exchange_choices_kernel(
    chosen, weights, sent, counts, counters, pointers, pad_pointers, rank, epoch, T, blocks, topk,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    block = tl.program_id(0)
    tokens = block * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, BLOCK_E)
    inside = (tokens[:, None] < T) & (experts[None, :] < EXPERTS)
    ranks = tl.zeros((ROWS,), dtype=tl.int32)
    number = tl.zeros((ROWS,), dtype=tl.int32)
    for owner in range(0, WORLD_SIZE):
        at = tokens[:, None].to(tl.int64) * groups + owner * EXPERTS + experts[None, :]
        choice = tl.load(chosen + at, mask=inside, other=0).to(tl.int32)
        weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        bits = weight.to(tl.int32, bitcast=True)
        bits = tl.where(bits == NOBODY, _NAN, bits)
        header = tl.load(pointers + owner).to(counts.dtype)
        words = _words_at(header, rank, T, blocks, WORLD_SIZE, EXPERTS)
        there = tokens[:, None] * EXPERTS + experts[None, :]
        tl.store(words + there, tl.where(choice != 0, bits, NOBODY), mask=inside)
        rows = tl.sum(choice, 0)
        to = _counts_at(header, rank, block, blocks, WORLD_SIZE, EXPERTS)
        tl.store(to + experts, rows, mask=experts < EXPERTS)
        here = counts + block * (groups + 1) + owner * EXPERTS
        tl.store(here + experts, rows, mask=experts < EXPERTS)
        number += tl.sum(choice, 1)
        ranks += (tl.max(choice, 1) != 0).to(tl.int32) << owner
    tl.store(sent + tokens, ranks, mask=tokens < T)
    tl.store(counts + block * (groups + 1) + groups, tl.max(number, 0))
    if count_acq_rel_gpu(counters, blocks):
        for owner in range(0, WORLD_SIZE):
            total = _first_counts(counts + owner * EXPERTS, groups + 1, blocks, EXPERTS, BLOCK_E)
            for peer in range(0, WORLD_SIZE):
                header = tl.load(pointers + peer).to(counts.dtype) + rank * (groups + 1)
                tl.store(header + owner * EXPERTS + experts, total, mask=experts < EXPERTS)
        most = 0
        for first in range(0, blocks, COUNTS):
            row = first + tl.arange(0, COUNTS)
            at = counts + row * (groups + 1) + groups
            most = tl.maximum(most, tl.max(tl.load(at, mask=row < blocks, other=0), 0))
        for step in range(0, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            header = tl.load(pointers + peer).to(counts.dtype) + rank * (groups + 1)
            tl.store(header + groups, most)
            pad = tl.load(pad_pointers + peer).to(counts.dtype)
            signal_release_sys(pad, rank * MAX_COMM_TILES, epoch)  # signal [X]


@triton.jit
def _check_totals(
    header, pad, status, topk, capacity, SAYS,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """1 if no token chooses more than `topk` experts and no rank gets more than `capacity` rows,
    else 0, and a refusal where `SAYS`.
    """
    stride: tl.constexpr = WORLD_SIZE * EXPERTS + 1
    ranks = tl.arange(0, BLOCK_R)
    experts = tl.arange(0, BLOCK_E)
    inside = (ranks[:, None] < WORLD_SIZE) & (experts[None, :] < EXPERTS)
    good = 1
    for rank in range(0, WORLD_SIZE):
        at = header + ranks[:, None] * stride + rank * EXPERTS + experts[None, :]
        rows = tl.sum(tl.sum(tl.load(at, mask=inside, other=0), 1), 0)
        most = tl.load(header + rank * stride + WORLD_SIZE * EXPERTS)
        if (good == 1) & (most > topk):
            good = 0
            if SAYS:
                refuse_release_sys(pad, _KINDS * rank + _CHOICES, topk, most, status)
        if (good == 1) & (rows > capacity):
            good = 0
            if SAYS:
                refuse_release_sys(pad, _KINDS * rank + _CAPACITY, capacity, rows, status)
    return good


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "T", "blocks", "topk", "capacity"])
def place_rows_kernel(
    places, weights, received, ends, pointers, pad, status, rank, epoch, timeout_ns: tl.int64, T,
    blocks, topk, capacity,
    SLOTS: tl.constexpr, BLOCK_R: tl.constexpr, REVERSE: tl.constexpr,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    block = tl.program_id(0) % blocks
    source = tl.program_id(0) // blocks
    for peer in range(0, WORLD_SIZE):
        wait_acquire_sys(pad, peer * MAX_COMM_TILES, epoch, deadline, status)  # wait [X]
    header = tl.load(pointers + rank).to(places.dtype)
    good = _check_totals(
        header, pad, status, topk, capacity, tl.program_id(0) == 0,
        WORLD_SIZE, EXPERTS, BLOCK_R, BLOCK_E,
    )  # fmt: skip
    experts = tl.arange(0, BLOCK_E)
    here = experts < EXPERTS
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    of_expert = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for other in range(0, WORLD_SIZE):
        at = header + other * (WORLD_SIZE * EXPERTS + 1) + rank * EXPERTS
        total = tl.load(at + experts, mask=here, other=0) * good
        of_expert += total
        before += tl.where(other < source, total, 0)
    behind = tl.cumsum(of_expert, 0)
    first = behind - of_expert
    if REVERSE:
        first = tl.sum(of_expert, 0) - behind
    if tl.program_id(0) == 0:
        order = experts
        if REVERSE:
            order = EXPERTS - 1 - experts
        tl.store(ends + order, first + of_expert, mask=here)
        tl.store(received + order, of_expert, mask=here)
    counts = _counts_at(header, source, 0, blocks, WORLD_SIZE, EXPERTS)
    first += before + _first_counts(counts, EXPERTS, block, EXPERTS, BLOCK_E)

    tokens = block * ROWS + tl.arange(0, ROWS)
    inside = (tokens[:, None] < T) & here[None, :] & (good == 1)
    words = _words_at(header, source, T, blocks, WORLD_SIZE, EXPERTS)
    word = tl.load(words + tokens[:, None] * EXPERTS + experts[None, :], mask=inside, other=NOBODY)
    chosen = (word != NOBODY).to(tl.int32)
    row = first[None, :] + tl.cumsum(chosen, 0) - chosen
    slot = tl.cumsum(chosen, 1) - chosen
    out = places + (source.to(tl.int64) * T + tokens) * SLOTS
    tl.store(out[:, None] + slot, row, mask=(chosen != 0) & (slot < SLOTS))
    number = tl.sum(chosen, 1)
    for slot_number in tl.static_range(SLOTS):
        tl.store(out + slot_number, NOBODY, mask=(tokens < T) & (number <= slot_number))
    tl.store(weights + row, word.to(tl.float32, bitcast=True), mask=chosen != 0)


@triton.jit(do_not_specialize=["rank", "epoch", "T", "blocks"])
def return_gradients_kernel(
    gradients, places, counters, pointers, pad_pointers, rank, epoch, T, blocks,
    WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of the weights of rows, to the ranks of their tokens: fp32 [R owners, T, SLOTS] there."""
    block = tl.program_id(0)
    tokens = block * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, BLOCK_S)
    inside = (tokens[:, None] < T) & (slots[None, :] < SLOTS)
    for source in range(0, WORLD_SIZE):
        at = (source * T.to(tl.int64) + tokens[:, None]) * SLOTS + slots[None, :]
        row = tl.load(places + at, mask=inside, other=NOBODY)
        value = tl.load(gradients + row, mask=row >= 0, other=0.0)
        there = tl.load(pointers + source).to(gradients.dtype)
        at = (rank.to(tl.int64) * T + tokens[:, None]) * SLOTS + slots[None, :]
        tl.store(there + at, value, mask=inside)
    if count_acq_rel_gpu(counters, blocks):
        for step in range(0, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            pad = tl.load(pad_pointers + peer).to(counters.dtype)
            signal_release_sys(pad, rank * MAX_COMM_TILES, epoch)  # signal [X]


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "T"])
def collect_gradients_kernel(
    dweights, chosen, pointers, pad, status, rank, epoch, timeout_ns: tl.int64, T,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dweights [T, R E] of what all ranks have returned; 0 where nothing is chosen."""
    deadline = deadline_after(timeout_ns)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, BLOCK_E)
    inside = (tokens[:, None] < T) & (experts[None, :] < EXPERTS)
    for owner in range(0, WORLD_SIZE):
        wait_acquire_sys(pad, owner * MAX_COMM_TILES, epoch, deadline, status)  # wait [X]
        at = tokens[:, None].to(tl.int64) * (WORLD_SIZE * EXPERTS) + owner * EXPERTS
        at += experts[None, :]
        choice = tl.load(chosen + at, mask=inside, other=0).to(tl.int32)
        slot = tl.cumsum(choice, 1) - choice
        came = tl.load(pointers + rank).to(tl.pointer_type(tl.float32))
        came += (owner * T.to(tl.int64) + tokens[:, None]) * SLOTS
        value = tl.load(came + slot, mask=(choice != 0) & (slot < SLOTS), other=0.0)
        tl.store(dweights + at, value.to(dweights.dtype.element_ty), mask=inside)
