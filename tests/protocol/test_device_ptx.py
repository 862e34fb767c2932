"""Memory order in own kernels as they are compiled, in Triton and in Gluon. Needs no GPU."""

from __future__ import annotations

import re

import pytest
from compiled_apart import named
from ptx_order import (
    ACQUIRE,
    BARRIER,
    COUNT,
    PROXY_FENCE,
    RELEASE,
    Ptx,
    check_needed,
    check_waits,
    parsed,
    without_records,
)
from test_embedding_ptx import ROWS, check_slices

SCRIPT = "compile_device.py"
pytestmark = pytest.mark.timeout(300)
LANGUAGES = ("triton", "gluon")


def check_barrier(ptx: Ptx) -> None:
    """Rows of all threads, then the signals."""
    ptx = without_records(ptx)
    ptx.require_some(ROWS, "no rows are stored")
    ptx.require_some(RELEASE, "no signal is released to the system")
    ptx.require(ROWS, RELEASE, BARRIER, "only one thread's rows: no CTA barrier")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_signal_follows_the_tiles_that_it_announces(compiled, language):
    for kernel in named(compiled, language, "norm").values():
        check_slices(parsed(kernel["ptx"]))
    for kernel in named(compiled, language, "barrier").values():
        check_barrier(parsed(kernel["ptx"]))


def test_tiles_are_read_after_their_signal(compiled):
    for kernel in compiled.values():
        check_waits(parsed(kernel["ptx"]))


def test_rows_move_by_whole_vectors(compiled):
    for name, kernel in named(compiled, "norm").items():
        assert re.search(r"ld\.global\.v4\.b32", kernel["ptx"]), name
        assert re.search(r"st\.global\.v4\.b32", kernel["ptx"]), name


def test_a_wait_in_gluon_orders_tma_loads(compiled):
    for kernel in named(compiled, "gluon").values():
        ptx = parsed(kernel["ptx"])
        ptx.require(ACQUIRE, ROWS, PROXY_FENCE, "TMA loads that follow are not fenced")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("kernel", "check", "removed", "reason"),
    [
        ("norm", check_slices, BARRIER, "no CTA barrier"),
        ("norm", check_slices, RELEASE, "no signal is released"),
        ("norm", check_slices, COUNT, "not counted"),
        ("norm", check_waits, BARRIER, "other threads load too early"),
        ("norm", check_waits, r"mov\.u64 %rd\d+, %globaltimer", "a spin without a clock"),
        ("norm", check_waits, r"ld\.global\.sys\.relaxed", "never gives up"),
        ("barrier", check_barrier, BARRIER, "no CTA barrier"),
        ("barrier", check_waits, ACQUIRE, "no signal is acquired"),
    ],
)
def test_each_instruction_is_needed(compiled, language, kernel, check, removed, reason):
    result = next(iter(named(compiled, language, kernel, "sm_90").values()))
    check_needed(check, result["ptx"], removed, reason)
