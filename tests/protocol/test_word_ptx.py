"""What the compiled kernels of few rows do to their words; `ptx_order` has how it is asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from compiled_apart import named
from ptx_order import (
    ACQUIRE,
    BARRIER,
    CLOCK,
    COUNT,
    LOOK,
    STORE,
    Misordered,
    Ptx,
    check_acquire,
    check_bounded,
    check_gives_up,
    check_needed,
    parsed,
)

from flux_megatron.kernels.hopper.config import BARRIERS_BYTES
from flux_megatron.kernels.shared_memory import HOPPER, stages_bytes
from flux_megatron.kernels.sizes import rows_of
from flux_megatron.overlap import low_latency_plans
from flux_megatron.problem import Pattern, Problem

SCRIPT = "compile_words.py"
pytestmark = pytest.mark.timeout(300)

SEND = r"st\.relaxed\.sys\.global\.b64"
RECEIVE = r"ld\.volatile\.global\.b64"
RENEW = r"st\.global(\.v\d)?\.b64"
FENCE = r"fence\.acq_rel\.sys"


def check_words(ptx: Ptx) -> None:
    """A word is one strong store, and one strong load. Only `renew` stores words otherwise."""
    ptx.require_some(SEND, "no word is sent")
    ptx.require_some(RECEIVE, "no word is received")
    if ptx.find(r"ld\.volatile\.global\.v"):
        raise Misordered("several words in one load")
    loads = [i for i in ptx.find(r"ld\.global\.v\d\.b64")]
    if loads:
        raise Misordered(f"words are loaded weakly: {ptx.instructions[loads[0]]!r}")


def check_spins(ptx: Ptx) -> None:
    """Every spin on words reads the clock in every turn, and may learn that others gave up."""
    clocks, looks = {*ptx.find(CLOCK)}, {*ptx.find(LOOK)}
    for poll in ptx.find(RECEIVE):
        if ptx.reach(poll, {poll}, clocks) is not None:
            raise Misordered(f"a spin without a clock: {ptx.instructions[poll]!r}")
    spins = [
        poll
        for poll in ptx.find(RECEIVE)
        if any(ptx.reach(poll, {look}, set()) and ptx.reach(look, {poll}, set()) for look in looks)
    ]
    if not spins:
        raise Misordered("a spin that never gives up")


def check_warps_agree(ptx: Ptx) -> None:
    """Warps ask each other, after the clock, whether a spin goes on: else one could leave it, and
    the others wait at a barrier for ever.
    """
    ptx.require(CLOCK, RECEIVE, BARRIER, "warps go on without asking each other")


def check_renewal(ptx: Ptx) -> None:
    """No word is sent before all threads' renewed words are where any rank sees them."""
    ptx.require_some(RENEW, "no word is renewed")
    ptx.require(RENEW, SEND, FENCE, "renewed words are not fenced")
    ptx.require(FENCE, SEND, BARRIER, "not all threads have fenced: no CTA barrier")


COUNTED = r"(atom|red)\.global\.sys\.release\.add"


def check_counted(ptx: Ptx) -> None:
    """A piece of the gathered rows is counted when all threads have stored it."""
    ptx.require_some(COUNTED, "no piece is counted")
    ptx.require(STORE, COUNTED, BARRIER, "only one thread's stores are ordered: no CTA barrier")


PART = r"ld\.global\.cg"  # another CTA's sums


def check_parts(ptx: Ptx) -> None:
    """A part is counted when all threads have stored it, and all threads load after the count."""
    ptx.require_some(COUNT, "no part is counted")
    ptx.require_some(PART, "no part is loaded past L1")
    ptx.require(STORE, COUNT, BARRIER, "only one thread's stores are ordered: no CTA barrier")
    ptx.require(COUNT, PART, BARRIER, "only one thread has acquired: no CTA barrier")


# of all kernels; of rows that are gathered; of sums whose K is in parts
ORDER = {
    "": [check_words, check_spins, check_warps_agree, check_renewal],
    "ag_gemv": [check_counted, check_acquire, check_bounded, check_gives_up],
    "parts": [check_parts],
}


@pytest.mark.parametrize("kind", ORDER)
def test_order_among_ranks_and_ctas(compiled, kind):
    for kernel in named(compiled, *kind.split()).values():
        for check in ORDER[kind]:
            check(parsed(kernel["ptx"]))


def test_all_kernels_have_parts_of_k(compiled):
    kinds = {name.split()[0] for name in named(compiled, "parts")}
    assert kinds == {"gemv_ar", "gemv_rs", "ag_gemv"}


@pytest.mark.parametrize(
    ("kernels", "check", "found", "put", "reason"),
    [
        ("bfloat16", check_words, SEND, "st.global.b64", "no word is sent"),
        ("bfloat16", check_words, RECEIVE, "ld.global.b64", "no word is received"),
        ("bfloat16", check_spins, r"mov\.u64 %rd\d+, %globaltimer", "", "without a clock"),
        ("bfloat16", check_spins, LOOK, "", "never gives up"),
        ("bfloat16", check_warps_agree, BARRIER, "", "without asking"),
        ("bfloat16", check_renewal, FENCE, "fence.acq_rel.gpu", "not fenced"),
        ("bfloat16", check_renewal, BARRIER, "", "no CTA barrier"),
        ("ag_gemv bfloat16", check_counted, COUNTED, "", "no piece is counted"),
        ("ag_gemv bfloat16", check_counted, BARRIER, "", "no CTA barrier"),
        ("ag_gemv bfloat16", check_acquire, ACQUIRE, "", "no signal is acquired"),
        ("ag_gemv bfloat16", check_acquire, BARRIER, "", "no CTA barrier"),
        ("ag_gemv bfloat16", check_bounded, CLOCK, "", "without a clock"),
        ("ag_gemv bfloat16", check_gives_up, LOOK, "", "never gives up"),
        ("ag_gemv tma", check_acquire, r"fence\.proxy\.async;", "", "TMA loads are not fenced"),
        ("parts", check_parts, COUNT, "", "no part is counted"),
        ("parts", check_parts, PART, "ld.global.ca", "no part is loaded"),
        ("parts", check_parts, BARRIER, "", "no CTA barrier"),
    ],
)
def test_each_instruction_is_needed(compiled, kernels, check, found, put, reason):
    for kernel in named(compiled, *kernels.split()).values():
        check_needed(check, kernel["ptx"], found, reason, put)


def test_copies_are_asynchronous_and_fit(compiled):
    """With at most 64 columns an SM each has one CTA, and much under way; with more it has two."""
    for name, kernel in compiled.items():
        copies = "cp.async.bulk.tensor" if "tma" in name.split() else "cp.async.cg"
        assert copies in kernel["ptx"], name
        columns = int(name.split(" N=")[1].split()[0])
        several = columns > 64 * low_latency_plans.SMS
        assert (1 + several) * kernel["shared_bytes"] <= 227 * 1024, name


def test_a_plan_knows_the_memory_of_its_kernel(compiled, monkeypatch):
    """To the byte, but for the barriers of TMA."""
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: True)
    for name, kernel in compiled.items():
        _, dtype, layout, M, N, *_ = name.split()
        problem = Problem(Pattern.GEMM_AR, int(M[2:]), int(N[2:]), 8192, dtype, 2, layout)
        tile = low_latency_plans.default_plan(problem).tile
        itemsize = 4 if dtype == "float32" else 2
        stages = stages_bytes(replace(tile, block_m=rows_of(problem.M)), itemsize, HOPPER)
        assert 0 <= kernel["shared_bytes"] - stages <= BARRIERS_BYTES * tile.tma, name


def words_in_a_row(layout: str) -> int:
    """Neighbouring words of a row that a warp stores at once; of words [N] or [M, N]."""
    if found := re.search(r"lane = (\[\[.*?\]\])", layout):
        lanes = json.loads(found[1])
        steps = [lane[-1] == 2**bit and not any(lane[:-1]) for bit, lane in enumerate(lanes)]
        return 2 ** [*steps, False].index(False)
    each, lanes, order = (
        json.loads(re.search(rf"{name} = (\[[\d, ]+\])", layout)[1])
        for name in ("sizePerThread", "threadsPerWarp", "order")
    )
    return lanes[-1] if order[0] == len(order) - 1 and each[-1] == 1 else 1


SECTOR_WORDS = 4  # 32 bytes, what memory and links move at least


def test_a_warp_stores_whole_sectors_of_words(compiled):
    """Of 16-bit values. A thread that adds up partial sums has several words."""
    seen = set()
    for name, kernel in compiled.items():
        kind, dtype, *more = name.split()
        assert kernel["word_stores"], name
        if dtype == "float32" or (kind != "ag_gemv" and "parts" in more):
            continue
        seen.add(kind)
        for layout in kernel["word_stores"]:
            assert words_in_a_row(layout) >= SECTOR_WORDS, name
    assert seen == {"gemv_ar", "gemv_rs", "ag_gemv"}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("#ttg.linear<{register = [[8, 0]], lane = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]}>", 4),
        ("#ttg.linear<{register = [[8, 0]], lane = [[1, 0], [0, 1], [0, 2], [2, 0], [4, 0]]}>", 1),
        ("#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], order = [1, 0]}>", 32),
        ("#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], order = [0, 1]}>", 1),
        ("#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], order = [1, 0]}>", 1),
    ],
)
def test_words_of_a_row_are_counted(layout, words):
    assert words_in_a_row(layout) == words
