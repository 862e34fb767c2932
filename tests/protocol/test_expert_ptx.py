"""Memory order in the compiled kernels of expert parallelism. Needs no GPU.

These kernels signal and wait, so a record of a late wait or of a refusal stands in them too: one
thread writes it and its mark, in that order. The checks of signals leave it out.
"""

from __future__ import annotations

import re

import pytest
from compiled_apart import check_shared_memory, named
from ptx_order import (
    ACQUIRE,
    BARRIER,
    COUNT,
    LOAD,
    RELEASE,
    TMA_LOAD,
    check_acquire,
    check_bounded,
    check_count,
    check_gives_up,
    check_needed,
    check_release,
    parsed,
    without_records,
)

SCRIPT = "compile_experts.py"
pytestmark = pytest.mark.timeout(900)  # all is compiled before the first, on two cores

TOKENS = ("send_tokens", "return_tokens")
SIGNALLING = ("a2a_gemm", "gemm_a2a", "exchange_counts", *TOKENS)
TELLING = ("exchange_choices", "return_gradients")  # they wait for nobody
AWAITING = ("place_rows", "collect_gradients", "collect")
VECTOR_STORE = r"st\.global\.v4"


def test_signals_follow_all_stores(compiled):
    for name in SIGNALLING + TELLING:
        for result in named(compiled, name).values():
            check_release(without_records(parsed(result["ptx"])))


def test_tiles_are_counted_before_their_signal(compiled):
    for result in named(compiled, "gemm_a2a").values():
        check_count(without_records(parsed(result["ptx"])))
    for name in ("a2a_gemm", *TOKENS, *TELLING):
        for result in named(compiled, name).values():
            parsed(result["ptx"]).require_some(COUNT, "pushes are not counted")


def test_bands_are_counted_after_their_tiles_are_stored(compiled):
    for result in named(compiled, "signalled_experts", "nt").values():
        check_release(parsed(result["ptx"]))
    for result in named(compiled, "signalled_experts", "nn").values():  # rows that come: no count
        assert not re.search(RELEASE, result["ptx"])


def test_loads_follow_the_signal(compiled):
    for name in ("a2a_gemm", "exchange_counts", *TOKENS, *AWAITING):
        for result in named(compiled, name).values():
            check_acquire(parsed(result["ptx"]))
    plain = LOAD.replace(f"|{TMA_LOAD}", "")  # by TMA it loads x, which no signal announces
    for result in named(compiled, "gemm_a2a").values():
        parsed(result["ptx"]).require(ACQUIRE, plain, BARRIER, "other threads load too early")


@pytest.mark.parametrize("kernel", SIGNALLING + AWAITING)
def test_waits_are_bounded(compiled, kernel):
    for result in named(compiled, kernel).values():
        check_bounded(parsed(result["ptx"]))
        check_gives_up(parsed(result["ptx"]))


def test_rows_travel_in_vectors(compiled):
    # with "nt" the last one stores by TMA
    kernels = "a2a_gemm", "gemm_a2a", "collect", *TOKENS
    for words in (*((name,) for name in kernels), ("signalled_experts", "nn")):
        for name, result in named(compiled, *words).items():
            assert re.search(VECTOR_STORE, result["ptx"]), name
            assert not re.search(r"st\.global\.b16|ld\.global\.b16", result["ptx"]), name


def test_hopper_multiplies_by_warp_groups(compiled):
    for kernel in ("a2a_gemm", "gemm_a2a", "expert_wgrad", "signalled_experts"):
        for name, result in named(compiled, "sm_90", kernel).items():
            assert "wgmma.mma_async" in result["ptx"], name


def test_shared_memory_suffices(compiled):
    check_shared_memory(compiled)


@pytest.mark.parametrize(
    ("kernel", "check", "removed", "reason"),
    [
        ("a2a_gemm", check_release, BARRIER, "no CTA barrier"),
        ("a2a_gemm", check_release, RELEASE, "no signal is released"),
        ("a2a_gemm", check_acquire, r"fence\.proxy\.async;", "not fenced"),
        ("gemm_a2a", check_release, r"cp\.async\.bulk\.wait_group 0;", "not complete"),
        ("collect", check_acquire, BARRIER, "other threads load too early"),
        ("send_tokens", check_release, BARRIER, "no CTA barrier"),
        ("return_tokens", check_acquire, BARRIER, "other threads load too early"),
        ("place_rows", check_acquire, BARRIER, "other threads load too early"),
        ("gemm_a2a", check_count, r"atom\.global\.gpu\.acq_rel", "not counted"),
        ("signalled_experts", check_release, BARRIER, "no CTA barrier"),
        ("signalled_experts", check_release, r"cp\.async\.bulk\.wait_group 0;", "not complete"),
        ("signalled_experts", check_release, r"fence\.proxy\.async;", "not fenced"),
    ],
)
def test_each_instruction_is_needed(compiled, kernel, check, removed, reason):
    layout = ["nt"] if kernel == "signalled_experts" else []
    result = next(iter(named(compiled, "sm_90", kernel, *layout).values()))
    check_needed(lambda ptx: check(without_records(ptx)), result["ptx"], removed, reason)
