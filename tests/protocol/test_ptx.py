"""Memory order in the compiled kernels; `ptx_order` has what is asked. Needs no GPU.

Interpreted runs prove the protocol and nothing about memory order. This proves what the
instructions say, not what a GPU does with them.
"""

from __future__ import annotations

import pytest
from compiled_apart import check_shared_memory, named
from ptx_order import (
    BARRIER,
    RELEASE,
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


def test_signal_follows_all_stores(compiled):
    for name, kernel in named(compiled, "gemm_rs").items():
        ptx = parsed(kernel["ptx"])
        assert bool(ptx.find(r"cp\.async\.bulk\.tensor")) == ("tma" in name.split()), name
        check_release(ptx)
        check_count(ptx)


def test_a_count_follows_all_stores(compiled):
    kernels = named(compiled, "signalled_gemm")
    assert {name.split()[0] for name in kernels} == {*TENSOR_CORES}
    for name, kernel in kernels.items():
        ptx = parsed(kernel["ptx"])
        assert bool(ptx.find(TMA_STORE)) == ("tma" in name.split()), name
        assert TENSOR_CORES[name.split()[0]] in kernel["ptx"], name
        check_release(ptx)


def test_an_entry_follows_the_reset(compiled):
    reset = r"st\.global\.v4"
    for result in named(compiled, "rank_barrier").values():
        ptx = parsed(result["ptx"])
        ptx.require_some(reset, "no slot is reset")
        ptx.require_some(RELEASE, "no entry is released to the system")
        ptx.require(reset, RELEASE, BARRIER, "only one thread's slots are reset before the entry")


@pytest.mark.parametrize("kernel", ["ag_gemm", "gathered_gemm", "reduce_received"])
def test_loads_follow_the_signal(compiled, kernel):
    for name, result in named(compiled, kernel).items():
        ptx = parsed(result["ptx"])
        assert bool(ptx.find(r"cp\.async\.bulk\.tensor")) == ("tma" in name.split()), name
        check_acquire(ptx)


@pytest.mark.parametrize(
    "kernel", ["ag_gemm", "gathered_gemm", "reduce_received", "wait_sources", "rank_barrier"]
)
def test_waits_are_bounded(compiled, kernel):
    for result in named(compiled, kernel).values():
        check_bounded(parsed(result["ptx"]))
        check_gives_up(parsed(result["ptx"]))


def test_shared_memory_suffices(compiled):
    check_shared_memory(compiled)


@pytest.mark.parametrize("architecture", TENSOR_CORES)
@pytest.mark.parametrize("kernel", ["ag_gemm", "gemm_rs"])
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


@pytest.mark.parametrize(
    ("kernel", "check", "removed", "reason"),
    [
        ("gemm_rs", check_release, BARRIER, "no CTA barrier"),
        ("gemm_rs", check_release, r"fence\.proxy\.async;", "not fenced"),
        ("gemm_rs", check_release, r"cp\.async\.bulk\.wait_group\s+0;", "not complete"),
        ("signalled_gemm", check_release, BARRIER, "no CTA barrier"),
        ("signalled_gemm", check_release, r"fence\.proxy\.async;", "not fenced"),
        ("signalled_gemm", check_release, r"cp\.async\.bulk\.wait_group\s+0;", "not complete"),
        ("gemm_rs", check_count, r"atom\.global\.gpu\.acq_rel", "not counted"),
        ("gemm_rs", check_count, BARRIER, "no CTA barrier between the count"),
        ("ag_gemm", check_acquire, BARRIER, "no CTA barrier"),
        ("ag_gemm", check_acquire, r"fence\.proxy\.async;", "not fenced"),
        ("ag_gemm", check_bounded, r"mov\.u64 %rd\d+, %globaltimer", "without a clock"),
        ("ag_gemm", check_gives_up, r"ld\.global\.sys\.relaxed", "never gives up"),
        ("gathered_gemm", check_acquire, BARRIER, "no CTA barrier"),
        ("gathered_gemm", check_acquire, r"fence\.proxy\.async;", "not fenced"),
        ("gathered_gemm", check_bounded, r"mov\.u64 %rd\d+, %globaltimer", "without a clock"),
        ("gathered_gemm", check_gives_up, r"ld\.global\.sys\.relaxed", "never gives up"),
    ],
)
def test_each_instruction_is_needed(compiled, kernel, check, removed, reason):
    """The shipped kernel with TMA, less all instructions of one kind."""
    check_needed(check, with_tma(compiled, kernel), removed, reason)


@pytest.mark.parametrize(
    ("kernel", "check", "found", "put", "reason"),
    [
        ("gemm_rs", check_release, r"sys\.release", "sys.relaxed", "no signal is released"),
        ("gemm_rs", check_release, r"sys\.release", "gpu.release", "no signal is released"),
        ("ag_gemm", check_acquire, r"sys\.acquire", "sys.relaxed", "no signal is acquired"),
        ("ag_gemm", check_bounded, r"sys\.acquire", "sys.relaxed", "no poll spins"),
        (
            "ag_gemm", check_bounded, r"(mov\.u64 (%rd\d+), %globaltimer);",
            r"\1; setp.gt.s64 %p9999, \2, 0; @%p9999 bra late; late:", "its own clock",
        ),
    ],
)  # fmt: skip
def test_weaker_instructions_are_rejected(compiled, kernel, check, found, put, reason):
    check_needed(check, with_tma(compiled, kernel), found, reason, put)


def with_tma(compiled: dict[str, dict], kernel: str) -> str:
    (ptx,) = [
        result["ptx"]
        for name, result in named(compiled, "sm_90", kernel, "bfloat16", "tma", "nt").items()
        if "128x256x64" in name
    ]
    return ptx
