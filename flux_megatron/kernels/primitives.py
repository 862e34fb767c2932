"""All memory order between ranks and between CTAs of Triton kernels, but that of words, which is in
`word_primitives`. No other Triton file spells an order, a scope or PTX, but for draws of
tiles, which order nothing (`portable.tile_draws`, `portable.gathered_gemm`).

| primitive | order |
| --- | --- |
| `signal_release_sys` | all earlier stores of this CTA, then the signal, for any rank |
| `wait_acquire_sys` | the signal, then all later loads of this CTA; a deadline bounds it |
| `arrives_acquire_sys` | the flag of a stream, then all later loads of this CTA; it may give up |
| `count_acq_rel_gpu` | joins the stores of several CTAs of one GPU before a single signal |
| `refuse_release_sys` | the words of a refusal, then the mark that the host reads |
| `count_release_sys` | all earlier stores of this CTA, then the count, for a stream's wait |
| `count_relaxed_gpu` | none: a number that outlives the launch |
| `complete_tma_stores` | TMA stores are in memory, and ordered before a later release |
| `acquire_for_tma_loads` | later TMA loads see what an acquire has made visible |

In the interpreter a wait is a host function that polls and yields the CPU. The fences are no-ops
there: its atomics are sequentially consistent on x86-64, and it has no asynchronous copies.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import triton
import triton.language as tl

from flux_megatron.symm import signals

INTERPRETED = triton.knobs.runtime.interpret

_TRIPPED = tl.constexpr(signals.STATUS_TRIPPED)
_SLOT = tl.constexpr(signals.STATUS_SLOT)
_EXPECTED = tl.constexpr(signals.STATUS_EXPECTED)
_SEEN = tl.constexpr(signals.STATUS_SEEN)
_PAD_LOW = tl.constexpr(signals.STATUS_PAD_LOW)
_PAD_HIGH = tl.constexpr(signals.STATUS_PAD_HIGH)
_OVER = tl.constexpr(signals.STATUS_OVER)
_LATE = tl.constexpr(signals.STATUS_LATE)
_REFUSED = tl.constexpr(signals.STATUS_REFUSED)
_LOOK_EVERY = tl.constexpr(signals.LOOK_EVERY)
_LOOK_AT_TIME = tl.constexpr(32)
MAX_COMM_TILES = tl.constexpr(signals.MAX_COMM_TILES)


@triton.jit
def signal_release_sys(pad, slot, epoch):
    """Write `epoch` to `slot` of a pad, after all stores of this CTA."""
    tl.debug_barrier()  # one thread signals, after the stores of all threads
    tl.atomic_xchg(pad + slot, epoch, sem="release", scope="sys")


@triton.jit
def count_acq_rel_gpu(counter, arrivals):
    """Count one arrival; True for the last of `arrivals`, which resets the counter for the next
    launch.

    The last CTA has acquired what the others released, so its signal covers their stores too.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def count_release_sys(counter):
    """Count one arrival, after everything this CTA has stored: for a stream that waits until the
    count is complete, and clears it.
    """
    tl.debug_barrier()  # one thread counts: the stores of the others must have been issued
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def count_relaxed_gpu(counter):
    """Count one and return the new number, the same in all threads; orders nothing else."""
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1


@triton.jit
def _time_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _deadline_after_device(timeout_ns):
    return _time_ns() + timeout_ns


@triton.jit
def _may_go_on(deadline, status):
    """Whether a wait that has not ended may go on: its time is not over, nor is another's.

    Its warps have clocks of their own. Warps that part wait for each other at barriers, and the
    kernel never ends (decision 0007). An atomic is one thread's, and gives its answer to all. So
    time that is over is counted, and the count is asked.
    """
    late = (_time_ns() >= deadline).to(tl.int32)
    tl.atomic_add(status + _OVER, late, sem="relaxed", scope="sys")
    return tl.atomic_add(status + _OVER, 0, sem="relaxed", scope="sys") == 0


@triton.jit
def wait_acquire(pad, slot, epoch, deadline, status, SCOPE: tl.constexpr):
    """Until `slot` holds `epoch`, or the deadline has passed."""
    seen = epoch
    going = True
    turns = 0
    while going:
        seen = tl.atomic_add(pad + slot, 0, sem="acquire", scope=SCOPE)
        going = seen - epoch < 0
        turns += 1
        if (turns % _LOOK_EVERY == 0) & going:  # at host memory, so not in every turn
            going = _may_go_on(deadline, status)
    if seen - epoch < 0:
        record_first(pad, slot, epoch, seen, status, _LATE)


@triton.jit
def _wait_acquire_sys_device(pad, slot, epoch, deadline, status):
    wait_acquire(pad, slot, epoch, deadline, status, "sys")


@triton.jit
def arrives_acquire(flag, waited, patience_us):
    """Whether a stream has set `flag`. If not, wait for it until some CTA has waited for
    `patience_us`. `waited` is the longest wait so far.
    """
    begin = _time_ns()
    seen = 0
    turns = 0
    going = True
    while going:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        going = seen == 0
        turns += 1
        if (turns % _LOOK_AT_TIME == 0) & going:  # an atomic gives all warps the same answer
            us = ((_time_ns() - begin) // 1000).to(tl.int32)
            tl.atomic_max(waited, us, sem="relaxed", scope="sys")
            going = tl.atomic_add(waited, 0, sem="relaxed", scope="sys") < patience_us
    return seen != 0


@triton.jit
def record_first(pad, number, expected, seen, status, reason):
    """Say what has failed and why, if it is the first failure: others follow from it."""
    # an atomic gives all warps the same answer
    if tl.atomic_add(status + _TRIPPED, 0, sem="relaxed", scope="sys") == 0:
        tl.store(status + _SLOT, number)
        tl.store(status + _EXPECTED, expected)
        tl.store(status + _SEEN, seen)
        address = pad.to(tl.int64, bitcast=True)
        tl.store(status + _PAD_LOW, address.to(tl.int32))
        tl.store(status + _PAD_HIGH, (address >> 32).to(tl.int32))
        tl.atomic_xchg(status + _TRIPPED, reason, sem="release", scope="sys")


@triton.jit
def _refuse_release_sys_device(pad, number, expected, seen, status):
    record_first(pad, number, expected, seen, status, _REFUSED)
    tl.atomic_add(status + _OVER, 1, sem="relaxed", scope="sys")


@triton.jit
def _complete_tma_stores_device():
    # Triton 3.6 and 3.7 wait only for the reads of shared memory (wait_group.read), 3.9 waits for
    # completion.
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0; }",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _acquire_for_tma_loads_device():
    tl.inline_asm_elementwise(
        "{ fence.proxy.async; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def integer(value) -> int:
    """The Python integer behind an interpreted scalar."""
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


def spin(too_early: Callable[[], int | None], deadline: int, record: ctypes.Array) -> None:
    """Host wait until `too_early` gives None: a few yields, then sleeps that double up to 2 ms.

    `TimeoutError`, which carries the value last seen, also once the status record is tripped.
    """
    turns = 0
    while (seen := too_early()) is not None:
        turns += 1
        if turns < 20:
            os.sched_yield()
        else:
            time.sleep(min(2e-3, 2e-5 * 2 ** min((turns - 20) // 4, 7)))
        if record[signals.STATUS_TRIPPED] or time.monotonic_ns() > deadline:
            raise TimeoutError(seen)


def poll(address: int, slot: int, epoch: int, deadline: int, record: ctypes.Array) -> None:
    """`spin` until the int32 at `address` has reached the epoch."""
    cell = ctypes.c_int32.from_address(address)
    spin(lambda: None if signals.reached(cell.value, epoch) else cell.value, deadline, record)


def is_set(address: int) -> bool:
    """Whether the int32 at `address` is not 0."""
    return ctypes.c_int32.from_address(address).value != 0


host_wait, host_arrives = poll, is_set  # the scheduler of virtual ranks in tests replaces them


def record_at(status) -> ctypes.Array:
    return (ctypes.c_int32 * signals.STATUS_WORDS).from_address(integer(status))


def record_first_host(pad, number, expected, seen, status, reason) -> None:
    record, address = record_at(status), integer(pad)
    if record[signals.STATUS_TRIPPED]:
        return
    record[signals.STATUS_SLOT], record[signals.STATUS_SEEN] = integer(number), integer(seen)
    record[signals.STATUS_EXPECTED] = integer(expected)
    record[signals.STATUS_PAD_LOW] = signals.as_int32(address)
    record[signals.STATUS_PAD_HIGH] = address >> 32
    record[signals.STATUS_TRIPPED] = reason


def _time_ns_host() -> int:
    return time.monotonic_ns()


def _deadline_after_host(timeout_ns) -> int:
    return time.monotonic_ns() + integer(timeout_ns)


def _wait_acquire_sys_host(pad, slot, epoch, deadline, status) -> None:
    address, number, expected = integer(pad) + 4 * integer(slot), integer(slot), integer(epoch)
    try:
        host_wait(address, number, expected, deadline, record_at(status))
    except TimeoutError as late:
        record_first_host(pad, slot, epoch, late.args[0], status, signals.STATUS_LATE)


def _arrives_acquire_sys_host(flag, waited, patience_us) -> bool:
    return host_arrives(integer(flag))


def _refuse_release_sys_host(pad, number, expected, seen, status) -> None:
    record_first_host(pad, number, expected, seen, status, signals.STATUS_REFUSED)


def _no_fence_needed() -> None: ...


time_ns = _time_ns_host if INTERPRETED else _time_ns
deadline_after = _deadline_after_host if INTERPRETED else _deadline_after_device
wait_acquire_sys = _wait_acquire_sys_host if INTERPRETED else _wait_acquire_sys_device
arrives_acquire_sys = _arrives_acquire_sys_host if INTERPRETED else arrives_acquire
refuse_release_sys = _refuse_release_sys_host if INTERPRETED else _refuse_release_sys_device
complete_tma_stores = _no_fence_needed if INTERPRETED else _complete_tma_stores_device
acquire_for_tma_loads = _no_fence_needed if INTERPRETED else _acquire_for_tma_loads_device


@triton.jit
def wait_rows(pad, source, first_row, last_row, comm_rows, epoch, deadline, status):
    """Wait for every communication tile of `source` that overlaps rows first_row to last_row of
    its shard.
    """
    for comm_tile in range(first_row // comm_rows, last_row // comm_rows + 1):
        wait_acquire_sys(pad, source * MAX_COMM_TILES + comm_tile, epoch, deadline, status)
