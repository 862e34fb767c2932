"""Memory order in the compiled kernels of Embedding + All-to-All. Needs no GPU."""

from __future__ import annotations

import pytest
from compiled_apart import named
from ptx_order import (
    BARRIER,
    COUNT,
    RELEASE,
    Misordered,
    Ptx,
    check_acquire,
    check_gives_up,
    check_needed,
    check_waits,
    parsed,
    without_records,
)

SCRIPT = "compile_embedding.py"
pytestmark = pytest.mark.timeout(300)
ROWS = r"st\.global\.v\d"


def check_slices(ptx: Ptx) -> None:
    """Rows, then the count, then the signal."""
    ptx = without_records(ptx)
    ptx.require_some(ROWS, "no rows are stored")
    ptx.require_some(RELEASE, "no signal is released to the system")
    ptx.require_some(COUNT, "tiles are not counted with acquire and release")
    ptx.require(ROWS, f"{COUNT}|{RELEASE}", BARRIER, "only one thread's rows: no CTA barrier")
    signals, counts = {*ptx.find(RELEASE)}, {*ptx.find(COUNT)}
    if any(ptx.reach(row, signals, counts) is not None for row in ptx.find(ROWS)):
        raise Misordered("a signal is raised without counting")
    if any(ptx.reach(count, signals, {*ptx.find(BARRIER)}) is not None for count in counts):
        raise Misordered("no CTA barrier between the count and the signal")


def test_a_signal_follows_the_rows_of_its_slice(compiled):
    for kernel in named(compiled, "forward", "D=128").values():
        check_slices(parsed(kernel["ptx"]))


@pytest.mark.parametrize("kernel", ["forward", "chunk_sums", "row_sums"])
def test_rows_are_read_after_their_signal(compiled, kernel):
    for result in named(compiled, kernel).values():
        check_waits(parsed(result["ptx"]))


def test_a_warp_reads_whole_lines(compiled):
    """Rows of 512 bytes by loads of 16, and no trip through shared memory for their indices."""
    for kernel in ("forward", "row_sums"):
        for result in named(compiled, "sm_90", kernel, "D=128").values():
            assert "ld.global.v4.b32" in result["ptx"], kernel


@pytest.mark.parametrize(
    ("kernel", "check", "removed", "reason"),
    [
        ("forward", check_slices, BARRIER, "no CTA barrier"),
        ("forward", check_slices, RELEASE, "no signal is released"),
        ("forward", check_slices, COUNT, "not counted"),
        ("row_sums", check_acquire, BARRIER, "other threads load too early"),
        ("row_sums", check_gives_up, r"ld\.global\.sys\.relaxed", "never gives up"),
    ],
)
def test_each_instruction_is_needed(compiled, kernel, check, removed, reason):
    (result,) = named(compiled, "sm_90", kernel, "D=128").values()
    check_needed(check, result["ptx"], removed, reason)
