"""How long CTAs wait for other ranks: an option of the kernels that wait.

With a buffer a kernel appends a record of every wait. With None it compiles no code for this.

| row of the buffer, int64 [1 + RECORDS, WORDS] | words |
| --- | --- |
| 0 | how many waits there were, in the first word; those beyond RECORDS are lost |
| 1 and on | CTA, tile, source rank, begin and end in nanoseconds of the device's clock |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.primitives import count_relaxed_gpu, time_ns

RECORDS = tl.constexpr(1 << 15)
WORDS = tl.constexpr(5)


@triton.jit
def wait_begins(waits):
    """The time in nanoseconds, or 0 if waits are not recorded."""
    begin_ns = 0
    if waits is not None:
        begin_ns = time_ns()
    return begin_ns


@triton.jit
def wait_ends(waits, begin_ns, tile, source):
    """Record the wait of this CTA's `tile` for `source`, which began at `begin_ns`."""
    if waits is not None:
        end_ns = time_ns()
        number = count_relaxed_gpu(waits)  # of this wait, from 1 on
        if number <= RECORDS:
            record = waits + number * WORDS
            tl.store(record, tl.program_id(0))
            tl.store(record + 1, tile)
            tl.store(record + 2, source)
            tl.store(record + 3, begin_ns)
            tl.store(record + 4, end_ns)


@triton.jit
def clock_kernel(now):
    tl.store(now, time_ns())


def read_clock(device: torch.device) -> Tensor:
    """The device's clock in nanoseconds, int64 [1], read by a kernel on the current stream."""
    now = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.cuda.device_of(now):
        clock_kernel[(1,)](now)
    return now


class Wait(NamedTuple):
    """The wait of a CTA in one tile for one rank, in times of the device's clock."""

    cta: int
    tile: int
    source: int
    begin_ns: int
    end_ns: int


def empty_buffers(count: int, device: torch.device) -> Tensor:
    """`count` buffers without a record, int64 [count, 1 + RECORDS, WORDS]."""
    rows = 1 + RECORDS.value
    return torch.zeros(count, rows, WORDS.value, dtype=torch.int64, device=device)


def read(buffer: Tensor) -> tuple[list[Wait], int]:
    """The waits of a buffer, sorted by begin, and the number of lost ones."""
    number = int(buffer[0, 0])
    kept = min(number, RECORDS.value)
    waits = [Wait(*row) for row in buffer[1 : 1 + kept].tolist()]
    return sorted(waits, key=lambda wait: wait.begin_ns), number - kept
