"""A kernel that only spins and holds whole SMs: what NCCL's kernels take from ours, and more.

A CTA has 16 warps and so much shared memory that no GEMM fits beside it, and there is one an SM.
It ends when it is told to, or when its limit has passed: so it tells whether what ran meanwhile
could end without its SM.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = 16
SHARED_KIB = 220  # of the 227 that a CTA may have
POLL_CYCLES = 40_000  # between two looks, so that the looks disturb nobody


@gluon.jit
def _clock(register: gl.constexpr):
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %" + register + ";", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["number"])  # a new number compiles nothing
def hold_kernel(seen, stop, number, limit_ns, KIB: gl.constexpr, CYCLES: gl.constexpr):
    """Spin until `stop` holds `number`; leave the SM, and 1 if that came before the limit."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    shared = gl.allocate_shared_memory(
        gl.int32, [KIB, 256], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    last = shared.index(KIB - 1)
    last.store(gl.arange(0, 256, layout))  # memory that nobody uses is not allocated
    begin_ns = _clock("globaltimer")
    stopped = gl.load(stop, volatile=True) == number
    while (not stopped) & (_clock("globaltimer") - begin_ns < limit_ns):
        begin = _clock("clock64")
        while _clock("clock64") - begin < CYCLES:
            pass
        stopped = gl.load(stop, volatile=True) == number
    sm = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    place = seen + 2 * gl.program_id(0)
    gl.store(place, sm + gl.min(last.load(layout), 0))  # plus 0
    gl.store(place + 1, stopped.to(gl.int32))


class HeldSms:
    """`begin` holds `count` SMs of the current device on a stream of its own, `end` lets go."""

    def __init__(self, count: int, limit_ms: float, device: torch.device) -> None:
        self.count, self._limit_ns = count, int(limit_ms * 1e6)
        self._stream = torch.cuda.Stream(device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.full((count, 2), -1, dtype=torch.int32, device=device)
        self._number = 0
        torch.cuda.synchronize(device)  # the words are there before another stream reads them
        self.begin()  # compiled and loaded now, not beside what is measured
        self.end()
        torch.cuda.synchronize(device)

    def begin(self) -> None:
        """Call it while the device is idle: then all of the SMs are held when it has begun."""
        self._number += 1
        with torch.cuda.stream(self._stream):
            hold_kernel[(self.count,)](
                self._seen, self._stop, self._number, self._limit_ns, KIB=SHARED_KIB,
                CYCLES=POLL_CYCLES, num_warps=WARPS,
            )  # fmt: skip

    def end(self) -> None:
        """Enqueued on the current stream: let go when all before it has ended."""
        self._stop.fill_(self._number)

    def was_asked_to_end(self) -> bool:
        """Whether no CTA ran out of its time; after a synchronisation."""
        seen = self._seen.tolist()
        assert len({sm for sm, _ in seen}) == self.count, f"not one CTA an SM: {seen}"
        return all(stopped for _, stopped in seen)
