"""Which order must the PTX of the Hopper kernels guarantee? Asked of each partition of warps.

| partition | warps | asked |
| --- | --- | --- |
| producer (AG, `gathered`) | 1 | loads of gathered rows come after their signal; waits end |
| store (RS) | 1 | that for the slots; tiles are in memory before they are counted or signalled |
| store (`signalled`, gemm_a2a) | 1 | tiles are in memory before they are counted or signalled |
| rows (a2a_gemm) | 2 | rows are stored before they are counted; copies come after their signal |
| MMA | 8, or 4 twice | stages and staging tile are handed over when all threads are done |
| MMA | 8, or 4 twice | split-K partials are counted when in memory, and loaded when counted |

Waits for an mbarrier have no clock: they are for warps of the same CTA, none of which waits for
ever.
"""

from __future__ import annotations

import re
from collections import defaultdict

from ptx_order import (
    ACQUIRE,
    ACQUIRE_GPU,
    CLOCK,
    LOAD,
    RELEASE,
    RELEASE_GPU,
    STORE,
    TMA_LOAD,
    TMA_STORE,
    Misordered,
    Ptx,
    check_bounded,
    check_count,
    check_gives_up,
    check_release,
    check_waits,
    without_records,
)

MMA = r"wgmma\.mma_async"
MMA_DONE = r"wgmma\.wait_group"
WARP_BARRIER = r"bar\.warp\.sync"
ARRIVE = r"mbarrier\.arrive\.shared"
INIT = r"mbarrier\.init"
SHARED_FENCE = r"fence\.proxy\.async(\.shared::cta)?$"
TMA_READ = r"cp\.async\.bulk\.wait_group"  # with or without .read: shared memory may be reused
STAGED_FP32 = r"st\.shared\.v2\.b32 \[ %r"
STAGED = rf"stmatrix|st\.shared\.v4|{STAGED_FP32}"
FETCHED = r"ldmatrix|ld\.shared\.v4|ld\.shared\.v2\.b32"


def barrier_of(warps: int) -> str:
    """What synchronises all threads of a partition."""
    return WARP_BARRIER if warps == 1 else rf"bar\.sync\s+\d+, {32 * warps}$"


def partitions(ptx: Ptx, instruction: str, *, but: str = "nothing") -> list[tuple[Ptx, str]]:
    """Those that have `instruction` and not `but`, and their barriers."""
    return [
        (part, barrier_of(warps))
        for part, warps in ptx.partitions()
        if part.find(instruction) and not part.find(but)
    ]


def multiplying(ptx: Ptx) -> list[tuple[Ptx, str]]:
    """Both warp groups in one partition, or each in one, and the barriers of these."""
    found = partitions(ptx, MMA)
    assert len(found) in (1, 2), f"{len(found)} partitions multiply, 1 or 2 expected"
    return found


def storing(ptx: Ptx) -> tuple[Ptx, str]:
    """The partition that stores what others multiply, and its barrier."""
    found = partitions(ptx, TMA_STORE, but=MMA)
    assert len(found) == 1, f"{len(found)} partitions store and do not multiply, 1 expected"
    return found[0]


def check_awaited(ptx: Ptx) -> None:
    """Wherever a signal is awaited, [A] or [B], its data is loaded after it, and the wait ends."""
    waiting = [(part, barrier_of(warps)) for part, warps in ptx.partitions() if part.find(ACQUIRE)]
    if not any(part.find(TMA_LOAD) for part, _ in waiting):
        raise Misordered("no signal is awaited before TMA loads")
    for part, barrier in waiting:
        check_waits(part, barrier)


def check_sent(ptx: Ptx) -> None:
    """RS and `signalled`: a tile is in memory before a stream [D], or another rank [B], hears of
    it.
    """
    store, barrier = storing(without_records(ptx))
    check_release(store, barrier)


def check_counted(ptx: Ptx) -> None:
    """RS by SMs: all CTAs' tiles are in memory before the signal [B]."""
    store, barrier = storing(without_records(ptx))
    check_count(store, barrier)


def rows_partition(ptx: Ptx) -> tuple[Ptx, str]:
    """The partition of two warps, which move rows."""
    found = [part for part, warps in ptx.partitions() if warps == 2]
    assert len(found) == 1, f"{len(found)} partitions of 2 warps, 1 expected"
    return found[0], barrier_of(2)


def check_pushed(ptx: Ptx) -> None:
    """a2a_gemm: rows are in memory before they are counted, and counted before the signal [Y]."""
    rows, barrier = rows_partition(without_records(ptx))
    check_release(rows, barrier)
    check_count(rows, barrier)


def check_partials(ptx: Ptx) -> None:
    """A partial is in memory before the CTA that adds it hears of it, and is loaded after that; the
    wait ends.
    """
    for mma, barrier in multiplying(without_records(ptx)):
        mma.require_some(RELEASE_GPU, "nobody hears of a partial")
        mma.require_some(ACQUIRE_GPU, "no partial is awaited")
        mma.require(STORE, RELEASE_GPU, barrier, "only one thread's stores are ordered")
        mma.require(ACQUIRE_GPU, LOAD, barrier, "other threads load too early")
        check_bounded(mma, ACQUIRE_GPU)
        check_gives_up(mma, ACQUIRE_GPU)


def check_only_signals_spin(ptx: Ptx) -> None:
    """Partitions that await no signal read no clock and no signal: nothing else there can spin."""
    for part, _ in ptx.partitions():
        if not part.find(CLOCK):
            for pattern in (RELEASE, r"ld\.volatile", r"ld\.\S*(acquire|relaxed)"):
                if part.find(pattern):
                    raise Misordered(f"a partition without a clock has {pattern}")


def check_awaits_nobody(ptx: Ptx) -> None:
    """`signalled`, gemm_a2a: nothing is awaited in memory, so no wait needs an end."""
    for pattern in (CLOCK, ACQUIRE, r"ld\.volatile", r"ld\.\S*(acquire|relaxed)"):
        if ptx.find(pattern):
            raise Misordered(f"a kernel that waits for nobody has {pattern}")


def check_stages(ptx: Ptx) -> None:
    """Barriers exist for TMA before a worker starts; stages are given back after their MMA."""
    for init in ptx.find(INIT):
        starts = set(ptx.find(r"^barrier\.sync"))
        if ptx.reach(init, starts, set(ptx.find(SHARED_FENCE))) is not None:
            raise Misordered("an mbarrier is used by TMA, but its start is not fenced")
    for mma, barrier in multiplying(ptx):
        mma.require(MMA, ARRIVE, MMA_DONE, "a stage is given back while it is read")
        mma.require(MMA_DONE, ARRIVE, barrier, "not all warps are done with a stage")


def check_staging_tile(ptx: Ptx) -> None:
    """The tile between MMA warps and TMA, in both directions."""
    apart = bool(partitions(ptx, TMA_STORE, but=MMA))
    given = ARRIVE if apart else TMA_STORE
    for mma, barrier in multiplying(ptx):
        mma.require_some(STAGED, "no tile is staged")
        mma.require(STAGED, given, SHARED_FENCE, "TMA stores what is not fenced")
        mma.require(SHARED_FENCE, given, barrier, "not all threads have staged their share")
        if apart:
            mma.require(FETCHED, ARRIVE, SHARED_FENCE, "TMA fetches over what is not fenced")
            mma.require(FETCHED, ARRIVE, barrier, "not all threads have read the fetched tile")
        else:
            for stored, staged in slices(mma):
                mma.require(stored, staged, TMA_READ, "overwritten while TMA reads it")
            mma.require(TMA_READ, STAGED, barrier, "one thread alone knows that TMA is done")
    if not apart:
        return
    store, barrier = storing(ptx)
    store.require(TMA_STORE, ARRIVE, TMA_READ, "given back while TMA reads it")
    store.require(TMA_READ, ARRIVE, barrier, "one thread alone knows that TMA is done")


def slices(mma: Ptx) -> list[tuple[str, str]]:
    """What stores a slice by TMA, and what stages it: a pair for each buffer. Buffers differ by the
    constant in their addresses, [%r + constant] or %r = %r + constant. None for fp32, whose rows
    have addresses of their own: its source is that of the others.
    """
    if mma.find(STAGED_FP32):
        return []
    added = {}
    for line in mma.instructions:
        if told := re.match(r"add\.s32\s+(%r\d+), %r\d+, (\d+)$", line):
            added[told[1]] = told[2]
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for which, pattern in enumerate((TMA_STORE, STAGED)):
        for i in mma.find(pattern):
            place = re.findall(r"\[(%r\d+)(?:\+(\d+))?\]", mma.instructions[i])[-1]
            found[place[1] or added.get(place[0], "")][which].add(
                re.escape("+".join(filter(None, place)))
            )
    assert all(stored and staged for stored, staged in found.values()), found
    return [
        tuple(
            rf"({pattern}).*\[({'|'.join(sorted(places))})\]"
            for pattern, places in zip((TMA_STORE, STAGED), pair, strict=True)
        )
        for pair in found.values()
    ]


# of a kernel, and of a way that stands in the name of a configuration
CHECKS = {
    "ag_gemm": [check_awaited, check_partials, check_only_signals_spin],
    "gemm_rs": [check_awaited, check_sent, check_partials, check_only_signals_spin],
    "gemm_ar": [check_awaited, check_sent, check_partials, check_only_signals_spin],
    "gemm_exchange": [check_sent, check_counted, check_partials, check_only_signals_spin],
    "signalled": [check_sent, check_awaits_nobody],
    "gathered": [check_awaited, check_only_signals_spin],
    "a2a_gemm": [check_awaited, check_pushed],
    "gemm_a2a": [check_sent, check_counted, check_awaits_nobody],
    "sm": [check_counted],
}
