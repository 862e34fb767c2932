"""Words that carry their own flag: 32 bits of data and the 32-bit epoch of the call that stored
them.

| primitive | order |
| --- | --- |
| `send_words` | none: each 64-bit store is seen whole, data and epoch together, by any rank |
| `receive_sum` | none: a word counts when its epoch is the call's; bounded by a deadline |
| `fence_sys` | all stores of this CTA so far, then its later ones, for every rank |

A word is written by one strong 64-bit store and read by strong 64-bit loads (volatile is relaxed at
system scope), which PTX never tears. So data needs no fence, no barrier and no signal behind it.
`receive_sum` adds up what it loads, in fp32 in the order of the sources, and begins anew until all
words that it has added are the call's: one trip to memory for all sources.
Interpreted, a wait is a host function, as in `primitives`.
"""

from __future__ import annotations

import ctypes

import triton
import triton.language as tl

from flux_megatron.kernels.primitives import (
    INTERPRETED,
    integer,
    record_at,
    record_first,
    record_first_host,
    spin,
    time_ns,
)
from flux_megatron.symm import signals

_OVER = tl.constexpr(signals.STATUS_OVER)
_LATE = tl.constexpr(signals.STATUS_LATE)
_LOOK_EVERY = tl.constexpr(signals.LOOK_EVERY)
_LEAST = tl.constexpr(-(2**31))
_MOST_THREADS = tl.constexpr(1024)  # of a CTA


@triton.jit
def pack_words(values, epoch, VALUES: tl.constexpr):
    """[M, N] of a 16-bit dtype (VALUES = 2) or fp32 (1)  ->  words [M, N / VALUES]."""
    if VALUES == 2:
        words = pack_pairs(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)), epoch)
    else:
        words = _with_epoch(values.to(tl.uint32, bitcast=True), epoch)
    return words


@triton.jit
def pack_pairs(pairs, epoch):
    """[..., 2] of a 16-bit dtype  ->  words [...]."""
    low, high = tl.split(pairs.to(tl.uint16, bitcast=True))
    return _with_epoch(low.to(tl.uint32) | (high.to(tl.uint32) << 16), epoch)


@triton.jit
def _with_epoch(data, epoch):
    return data.to(tl.int64) | (epoch.to(tl.int64) << 32)


@triton.jit
def unpack_words(words, dtype: tl.constexpr, VALUES: tl.constexpr):
    """The values of `pack_words` in fp32."""
    data = words.to(tl.uint32)
    if VALUES == 2:
        low = (data & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = (data >> 16).to(tl.uint16).to(dtype, bitcast=True)
        values = tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 2))
    else:
        values = data.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _send_words_device(pointers, words, mask):
    tl.inline_asm_elementwise(
        """{
        .reg .pred inside;
        setp.ne.u32 inside, $3, 0;
        mov.u32 $0, 0;
        @inside st.relaxed.sys.global.b64 [$1], $2;
        }""",
        "=r,l,l,r",
        [pointers.to(tl.int64), words, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _send_words_interpreted(pointers, words, mask):
    tl.store(pointers, words, mask=mask)


@triton.jit
def _look(
    slots, at, inside, slot_words, epoch, dtype: tl.constexpr,
    SOURCES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The sum of what lies there now, and 1 + the last source of which a word is missing, or 0."""
    total = tl.zeros((at.shape[0], at.shape[1] * VALUES), dtype=tl.float32)
    missing = tl.zeros(at.shape, dtype=tl.int32)
    for source in tl.static_range(SOURCES):
        words = tl.load(slots + source * slot_words + at, mask=inside, other=0, volatile=True)
        old = inside & ((words >> 32).to(tl.int32) != epoch)
        missing = tl.where(old, source + 1, missing)
        total += unpack_words(words, dtype, VALUES)
    return total, tl.max(missing)


@triton.jit
def _agreed(number, flag):
    """The largest `number` of all warps, and whether one that has it has the `flag`.

    Of fewer words than threads, warps look at the same words, and Triton takes what each sees as
    what all see. But one warp can look before a word comes, and another after that: they part, wait
    at barriers for each other, and the kernel never ends (GEMM+RS of 4 rows, 2 x H100, 2026-11-25,
    triton 3.6). So this asks every thread of a CTA, in a way that hides that they should agree.
    """
    both = tl.zeros((_MOST_THREADS,), dtype=tl.int32) + (2 * number + flag.to(tl.int32))
    seen = tl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [both], dtype=tl.int32, is_pure=False, pack=1
    )
    largest = tl.max(seen)
    return largest >> 1, (largest & 1) != 0


@triton.jit
def _receive_sum_device(
    slots, at, inside, slot_words, epoch, first_source, deadline, status, memory,
    dtype: tl.constexpr, SOURCES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    total, missing = _look(slots, at, inside, slot_words, epoch, dtype, SOURCES, VALUES)
    missing, in_time = _agreed(missing, time_ns() < deadline)
    turns = 0
    while (missing != 0) & in_time:
        total, missing = _look(slots, at, inside, slot_words, epoch, dtype, SOURCES, VALUES)
        missing, in_time = _agreed(missing, time_ns() < deadline)
        turns += 1
        if turns % _LOOK_EVERY == 0:  # noqa: SIM102, `and` would look at host memory in every turn
            if tl.atomic_add(status + _OVER, 0, sem="relaxed", scope="sys") != 0:
                deadline = deadline * 0  # a wait has run out of time: all give up
    if missing != 0:
        words = tl.load(slots + (missing - 1) * slot_words + at, mask=inside, volatile=True)
        seen = tl.where(inside & ((words >> 32).to(tl.int32) != epoch), words >> 32, _LEAST)
        seen = tl.max(seen).to(tl.int32)
        record_first(memory, first_source + missing - 1, epoch, seen, status, _LATE)
        tl.atomic_add(status + _OVER, 1, sem="relaxed", scope="sys")
    return total


@triton.jit
def _receive_sum_interpreted(
    slots, at, inside, slot_words, epoch, first_source, deadline, status, memory,
    dtype: tl.constexpr, SOURCES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    for source in tl.static_range(SOURCES):
        places = slots + source * slot_words + at
        _await_words(places, inside, first_source + source, epoch, deadline, status, memory)
    total, _ = _look(slots, at, inside, slot_words, epoch, dtype, SOURCES, VALUES)
    return total


@triton.jit
def _fence_sys_device():
    tl.inline_asm_elementwise(
        "{ fence.acq_rel.sys; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


def missing_word(addresses: list[int], epoch: int) -> int | None:
    """The epoch of the first word of another call, or None if all words have come."""
    for address in addresses:
        seen = ctypes.c_int32.from_address(address + 4).value
        if seen != epoch:
            return seen
    return None


def poll_words(
    addresses: list[int], source: int, epoch: int, deadline: int, record: ctypes.Array
) -> None:
    """`spin` until the words at `addresses` are the call's."""
    spin(lambda: missing_word(addresses, epoch), deadline, record)


host_wait_words = poll_words  # a test's scheduler of virtual ranks puts its own wait here


def _await_words(pointers, mask, source, epoch, deadline, status, memory) -> None:
    addresses = pointers.handle.data[mask.handle.data].tolist()
    try:
        host_wait_words(addresses, integer(source), integer(epoch), deadline, record_at(status))
    except TimeoutError as late:
        record_first_host(memory, source, epoch, late.args[0], status, signals.STATUS_LATE)


def _no_fence_needed() -> None: ...


send_words = _send_words_interpreted if INTERPRETED else _send_words_device
receive_sum = _receive_sum_interpreted if INTERPRETED else _receive_sum_device
fence_sys = _no_fence_needed if INTERPRETED else _fence_sys_device
