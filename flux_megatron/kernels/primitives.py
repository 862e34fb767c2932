"""All memory order between ranks and between programs; no other file spells `sem=`, `scope=` or
PTX.

| primitive | order |
| --- | --- |
| `signal_release_sys` | all this program's earlier stores, then the signal, seen by any rank |
| `wait_acquire_sys` | the signal, then this program's later loads; bounded by a deadline |
| `count_acq_rel_gpu` | joins the stores of several programs of one GPU before a single signal |
| `count_relaxed_gpu` | none: a number that outlives the launch |
| `draw`, `end_draws` | none: which CTA makes which tile |
| `complete_tma_stores` | TMA stores are in memory, and ordered before a release that follows |
| `acquire_for_tma_loads` | TMA loads that follow see what an acquire has made visible |

Interpreted, a wait is a host function that polls and gives the CPU away; the fences are no-ops,
because the interpreter's atomics are sequentially consistent on x86-64 and it has no asynchronous
copies.
"""

from __future__ import annotations

import ctypes
import os
import time

import triton
import triton.language as tl

from flux_megatron.symm import signals

INTERPRETED = triton.knobs.runtime.interpret

_TRIPPED = tl.constexpr(signals.STATUS_TRIPPED)
_SLOT = tl.constexpr(signals.STATUS_SLOT)
_EXPECTED = tl.constexpr(signals.STATUS_EXPECTED)
_SEEN = tl.constexpr(signals.STATUS_SEEN)
MAX_COMM_TILES = tl.constexpr(signals.MAX_COMM_TILES)


@triton.jit
def signal_release_sys(pad, slot, epoch):
    """Announce `epoch` in `slot` of a pad, after everything this program has stored."""
    tl.debug_barrier()  # one thread signals: the stores of the others must have been issued
    tl.atomic_xchg(pad + slot, epoch, sem="release", scope="sys")


@triton.jit
def count_acq_rel_gpu(counter, arrivals):
    """Count one arrival; True for the last of `arrivals`, which resets the counter for the next
    launch.

    The last program has acquired what the others released, so a signal of its own covers their
    stores too.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def count_relaxed_gpu(counter):
    """Count one and give the new number, the same to all threads; orders nothing else."""
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1


@triton.jit
def draw(work_counter):
    """The next tile that nobody has drawn, in the order of the kernel. No tile belongs to a CTA: one
    that gets no SM, because another kernel holds it, holds up nothing.
    """
    return tl.atomic_add(work_counter, 1, sem="relaxed", scope="gpu")


@triton.jit
def end_draws(work_counter, drawn, tiles):
    """Every CTA draws once in vain. The last of these draws sets the counter to 0 for the next
    launch: nobody draws after it.
    """
    if drawn == tiles + tl.num_programs(0) - 1:
        tl.atomic_xchg(work_counter, 0, sem="relaxed", scope="gpu")


@triton.jit
def _time_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _deadline_after_device(timeout_ns):
    return _time_ns() + timeout_ns


@triton.jit
def _wait_acquire_sys_device(pad, slot, epoch, deadline, status):
    seen = tl.atomic_add(pad + slot, 0, sem="acquire", scope="sys")
    while (seen - epoch < 0) & (_time_ns() < deadline):
        seen = tl.atomic_add(pad + slot, 0, sem="acquire", scope="sys")
    late = seen - epoch < 0
    if late:  # the first to be late is told, not those that follow from it
        late = tl.load(status + _TRIPPED, volatile=True) == 0
    if late:
        tl.store(status + _SLOT, slot)
        tl.store(status + _EXPECTED, epoch)
        tl.store(status + _SEEN, seen)
        tl.atomic_xchg(status + _TRIPPED, 1, sem="release", scope="sys")


@triton.jit
def _complete_tma_stores_device():
    # Triton 3.6 and 3.7 wait only until shared memory has been read (wait_group.read); 3.9 waits
    # for completion.
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


def _word(value) -> int:
    """The Python integer behind an interpreted scalar."""
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


def poll(address: int, slot: int, epoch: int, deadline: int) -> None:
    """Host wait for the int32 at `address`: a few yields, then sleeps that double up to 2 ms.

    `TimeoutError` carries the value last seen.
    """
    cell = ctypes.c_int32.from_address(address)
    turns = 0
    while not signals.reached(cell.value, epoch):
        turns += 1
        if turns < 20:
            os.sched_yield()
        else:
            time.sleep(min(2e-3, 2e-5 * 2 ** min((turns - 20) // 4, 7)))
        if time.monotonic_ns() > deadline:
            raise TimeoutError(cell.value)


host_wait = poll  # a test's scheduler of virtual ranks puts its own wait here


def _time_ns_host() -> int:
    return time.monotonic_ns()


def _deadline_after_host(timeout_ns) -> int:
    return time.monotonic_ns() + _word(timeout_ns)


def _wait_acquire_sys_host(pad, slot, epoch, deadline, status) -> None:
    try:
        host_wait(_word(pad) + 4 * _word(slot), _word(slot), _word(epoch), deadline)
    except TimeoutError as late:
        record = (ctypes.c_int32 * signals.STATUS_WORDS).from_address(_word(status))
        if record[signals.STATUS_TRIPPED]:  # the first to be late is told, not those that follow
            return
        record[signals.STATUS_SLOT] = _word(slot)
        record[signals.STATUS_EXPECTED] = _word(epoch)
        record[signals.STATUS_SEEN] = late.args[0]
        record[signals.STATUS_TRIPPED] = 1


def _no_fence_needed() -> None: ...


time_ns = _time_ns_host if INTERPRETED else _time_ns
deadline_after = _deadline_after_host if INTERPRETED else _deadline_after_device
wait_acquire_sys = _wait_acquire_sys_host if INTERPRETED else _wait_acquire_sys_device
complete_tma_stores = _no_fence_needed if INTERPRETED else _complete_tma_stores_device
acquire_for_tma_loads = _no_fence_needed if INTERPRETED else _acquire_for_tma_loads_device


@triton.jit
def wait_rows(pad, source, first_row, last_row, comm_rows, epoch, deadline, status):
    """Wait for every communication tile of `source` that overlaps rows first_row to last_row of
    its shard.
    """
    for comm_tile in range(first_row // comm_rows, last_row // comm_rows + 1):
        wait_acquire_sys(pad, source * MAX_COMM_TILES + comm_tile, epoch, deadline, status)
