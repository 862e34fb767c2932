"""Memory order in the compiled kernels; `ptx_order` has what is asked. Needs no GPU.

Interpreted runs prove the protocol and nothing about memory order. This proves what the
instructions say, not what a GPU does with them.
"""

from __future__ import annotations

import pytest
from compiled_apart import check_shared_memory, named
from ptx_order import (
    BARRIER,
    CHECKS,
    COUNT,
    LOOK,
    RELEASE,
    TMA_COMPLETE,
    TMA_LOAD,
    TMA_STORE,
    check_acquire,
    check_bounded,
    check_count,
    check_gives_up,
    check_needed,
    check_release,
    parsed,
)

SCRIPT = "compile_kernels.py"
pytestmark = pytest.mark.timeout(900)  # all is compiled before the first, on two cores

TENSOR_CORES = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}


@pytest.mark.parametrize("kernel", CHECKS)
def test_order_among_ranks_and_ctas(compiled, kernel):
    for result in named(compiled, kernel).values():
        for check in CHECKS[kernel]:
            check(parsed(result["ptx"]))


def test_a_name_says_who_uses_tma(compiled):
    """`signalled_gemm` for its stores too."""
    for name, result in compiled.items():
        words = name.split()
        by_tma = TMA_STORE if "signalled_gemm" in words else rf"{TMA_STORE}|{TMA_LOAD}"
        assert bool(parsed(result["ptx"]).find(by_tma)) == ("tma" in words), name


def test_an_entry_follows_the_reset(compiled):
    reset = r"st\.global\.v4"
    for result in named(compiled, "rank_barrier").values():
        ptx = parsed(result["ptx"])
        ptx.require_some(reset, "no slot is reset")
        ptx.require_some(RELEASE, "no entry is released to the system")
        ptx.require(reset, RELEASE, BARRIER, "only one thread's slots are reset before the entry")


def test_shared_memory_suffices(compiled):
    check_shared_memory(compiled)


@pytest.mark.parametrize("architecture", TENSOR_CORES)
@pytest.mark.parametrize("kernel", ["ag_gemm", "gemm_rs", "signalled_gemm"])
def test_each_generation_multiplies_by_its_tensor_cores(compiled, kernel, architecture):
    """By warp groups on Hopper, and with accumulators in tensor memory on Blackwell."""
    kernels = named(compiled, architecture, kernel)
    for name, result in kernels.items():
        if "float32" not in name.split():
            assert TENSOR_CORES[architecture] in result["ptx"], name


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", ["ag_gemm", "gemm_rs"])
def test_full_precision_means_no_tf32(compiled, architecture, kernel):
    for name, result in named(compiled, architecture, kernel, "float32").items():
        assert "tf32" not in result["ptx"], name


CLOCK_READ, FENCE = r"mov\.u64 %rd\d+, %globaltimer", r"fence\.proxy\.async;"


@pytest.mark.parametrize(
    ("kernel", "check", "found", "put", "reason"),
    [
        ("gemm_rs", check_release, BARRIER, "", "no CTA barrier"),
        ("gemm_rs", check_release, FENCE, "", "not fenced"),
        ("gemm_rs", check_release, TMA_COMPLETE, "", "not complete"),
        ("gemm_rs", check_release, r"sys\.release", "sys.relaxed", "no signal is released"),
        ("gemm_rs", check_release, r"sys\.release", "gpu.release", "no signal is released"),
        ("gemm_rs", check_count, COUNT, "", "not counted"),
        ("gemm_rs", check_count, BARRIER, "", "no CTA barrier between the count"),
        ("signalled_gemm", check_release, BARRIER, "", "no CTA barrier"),
        ("signalled_gemm", check_release, FENCE, "", "not fenced"),
        ("signalled_gemm", check_release, TMA_COMPLETE, "", "not complete"),
        ("ag_gemm", check_acquire, BARRIER, "", "no CTA barrier"),
        ("ag_gemm", check_acquire, FENCE, "", "not fenced"),
        ("ag_gemm", check_acquire, r"sys\.acquire", "sys.relaxed", "no signal is acquired"),
        ("ag_gemm", check_bounded, CLOCK_READ, "", "without a clock"),
        ("ag_gemm", check_bounded, r"sys\.acquire", "sys.relaxed", "no poll spins"),
        (
            "ag_gemm", check_bounded, r"(mov\.u64 (%rd\d+), %globaltimer);",
            r"\1; setp.gt.s64 %p9999, \2, 0; @%p9999 bra late; late:", "its own clock",
        ),
        ("ag_gemm", check_gives_up, LOOK, "", "never gives up"),
        ("gathered_gemm", check_acquire, BARRIER, "", "no CTA barrier"),
        ("gathered_gemm", check_acquire, FENCE, "", "not fenced"),
        ("gathered_gemm", check_bounded, CLOCK_READ, "", "without a clock"),
        ("gathered_gemm", check_gives_up, LOOK, "", "never gives up"),
    ],
)  # fmt: skip
def test_each_instruction_is_needed(compiled, kernel, check, found, put, reason):
    """The shipped kernel with TMA, less all instructions of one kind, or with weaker ones."""
    check_needed(check, with_tma(compiled, kernel), found, reason, put)


def with_tma(compiled: dict[str, dict], kernel: str) -> str:
    (ptx,) = [
        result["ptx"]
        for name, result in named(compiled, "sm_90", kernel, "bfloat16", "tma", "nt").items()
        if "128x256x64" in name
    ]
    return ptx
