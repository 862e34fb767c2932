"""Memory order and cost in the compiled Hopper kernels; `hopper_order` has what is asked. Needs no
GPU.
"""

from __future__ import annotations

import re
import subprocess

import pytest
from compiled_apart import check_shared_memory, named
from compiler_versions import SPILLED, SPILLED_BYTES_MAX, assembler
from hopper_order import (
    CHECKS,
    check_awaited,
    check_counted,
    check_partials,
    check_pushed,
    check_sent,
    check_stages,
    check_staging_tile,
)
from ptx_order import Misordered, Ptx, check_needed, parsed

SCRIPT = "compile_hopper.py"
pytestmark = pytest.mark.timeout(900)  # all is compiled before the first, on two cores

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def first_of(compiled: dict[str, dict], *words: str, field: str = "ptx") -> str:
    return next(iter(named(compiled, *words).values()))[field]


@pytest.mark.parametrize("check", [check_stages, check_staging_tile])
def test_warps_hand_over_in_order(compiled, check):
    for result in compiled.values():
        check(parsed(result["ptx"]))


@pytest.mark.parametrize("kernel", CHECKS)
def test_order_among_ranks_and_ctas(compiled, kernel):
    for result in named(compiled, kernel).values():
        for check in CHECKS[kernel]:
            check(parsed(result["ptx"]))


@pytest.mark.parametrize(
    ("way", "tiles"),
    [
        *[(f"ag_gemm {way}", "128x256 128x128 64x128 64x64") for way in ("plain", "bias", "parts")],
        *[(f"ag_gemm {way} long", "128x256") for way in ("plain", "bias")],
        *[
            (f"gemm_rs {way}", "128x256 128x128")
            for way in ("sm", "copy_engine", "copy_engine short")
        ],
    ],
)
def test_every_way_is_compiled(compiled, way, tiles):
    for tile in tiles.split():
        assert named(compiled, *way.split(), tile)


def test_shared_memory_suffices(compiled):
    check_shared_memory(compiled)


def complaints(log: str, spilled_bytes_max: int = 0) -> list[str]:
    """What the assembler says of spilled registers and of MMAs that wait for each other."""
    sizes = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", log)
    spilled = [f"{size} bytes {kind}" for size, kind in sizes if int(size) > spilled_bytes_max]
    return spilled + re.findall(r"\(C75\d\d\).*", log)


def test_registers_suffice_and_mmas_overlap(compiled):
    for name, result in compiled.items():
        assert "bytes spill stores" in result["ptxas"], name
        most = max(SPILLED_BYTES_MAX, SPILLED.get(name, 0))
        assert complaints(result["ptxas"], most) == [], name
        assert "wgmma.mma_async" in result["ptx"], name


def loops_of_mmas(sass: str) -> list[list[str]]:
    """The lines of each loop over k-tiles, up to its last MMA: of the branches back to before the
    same MMAs the shortest, because waits branch back from the end of the code; and of such loops
    the innermost.
    """
    lines = sass.splitlines()
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    mmas = [i for i, line in enumerate(lines) if re.search(r"\b[HQ]GMMA", line)]
    loops: dict[tuple[int, ...], tuple[int, int]] = {}
    for last, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        first = labels.get(target[1], last) if target else last
        if inside := tuple(i for i in mmas if first < i < last):
            shortest = loops.get(inside, (0, len(lines)))
            loops[inside] = min((first, last), shortest, key=lambda loop: loop[1] - loop[0])
    inner = [inside for inside in loops if not any({*inside} > {*other} for other in loops)]
    return [lines[loops[inside][0] : inside[-1]] for inside in sorted(inner)]


def slow_in_loops(sass: str) -> int:
    """What makes MMAs wait in the loops over k-tiles: moves from vector to uniform registers, for
    their descriptors, and registers that are spilled.
    """
    loops = loops_of_mmas(sass)
    assert loops, "the MMAs are in no loop"
    return sum(bool(re.search(r"\b(R2UR|LDL|STL)\b", line)) for loop in loops for line in loop)


def test_nothing_in_the_loops_of_mmas_holds_them_up(compiled):
    assert [name for name, result in compiled.items() if slow_in_loops(result["sass"])] == []


@pytest.mark.parametrize("slow", ["R2UR UR4, R170 ;", "LDL.64 R2, [R1+0x10] ;", "STL [R1], R8 ;"])
@pytest.mark.parametrize("loop", [0, -1])
def test_what_holds_up_mmas_is_found(compiled, slow, loop):
    """In the loop of either warp group."""
    sass = first_of(compiled, "ag_gemm", "plain", "nt", "128x256", field="sass")
    assert len(loops_of_mmas(sass)) == 2
    first = "\n".join(loops_of_mmas(sass)[loop])
    assert sass.count(first) == 1
    assert slow_in_loops(sass.replace(first, f"{first}\n  {slow}\n  HGMMA ")) == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({r"wgmma\.wait_group\.sync\.aligned [01];": ""}, "C75"),
        ({r"setmaxnreg[^;]*;": "", r"\.maxnreg \d+": ".maxnreg 154"}, "spill"),
    ],
)
def test_the_assembler_complains(compiled, tmp_path, changes, complaint):
    ptx = first_of(compiled, "ag_gemm", "bias", "nn", "128x256")
    for found, instead in changes.items():
        ptx, count = re.subn(found, instead, ptx)
        assert count, f"there is no {found}"
    source = tmp_path / "changed.ptx"
    source.write_text(ptx)
    command = [assembler(), "-v", "--gpu-name=sm_90a"]
    run = subprocess.run([*command, source, "-o", tmp_path / "it"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert any(complaint in one for one in complaints(run.stderr)), run.stderr


WARPS, PARTITION = r"bar\.warp\.sync", r"bar\.sync"
COMPLETE = r"cp\.async\.bulk\.wait_group\s+0;"
READ = r"cp\.async\.bulk\.wait_group\.read"
FENCE = r"fence\.proxy\.async;"
SHARED_FENCE = r"fence\.proxy\.async\.shared"
CLOCK = r"mov\.u64 %rd\d+, %globaltimer"
MMAS_DONE = r"wgmma\.wait_group"
LEFT = r"(atom|red)\.global\.sys\.release\.add"
COUNT = r"atom\.global\.gpu\.acq_rel"
COUNTED = r"(atom|red)\.global\.gpu\.release\.add"
AWAITED = r"ld\.global\.gpu\.acquire"


@pytest.mark.parametrize(
    ("kernel", "check", "removed", "reason"),
    [
        ("ag_gemm plain", check_awaited, WARPS, "no CTA barrier"),
        ("ag_gemm plain", check_awaited, FENCE, "not fenced"),
        ("ag_gemm plain", check_awaited, CLOCK, "without a clock"),
        ("ag_gemm plain", check_stages, SHARED_FENCE, "start is not fenced"),
        ("ag_gemm plain", check_stages, MMAS_DONE, "while it is read"),
        ("ag_gemm plain", check_stages, PARTITION, "not all warps are done"),
        ("ag_gemm plain", check_staging_tile, SHARED_FENCE, "stores what is not fenced"),
        ("ag_gemm plain", check_staging_tile, PARTITION, "not all threads have staged"),
        ("ag_gemm plain", check_staging_tile, READ, "overwritten while TMA reads"),
        ("gemm_rs copy_engine", check_awaited, WARPS, "no CTA barrier"),
        ("gemm_rs copy_engine", check_awaited, FENCE, "not fenced"),
        ("gemm_rs copy_engine", check_awaited, CLOCK, "without a clock"),
        ("gemm_rs copy_engine", check_sent, COMPLETE, "not complete"),
        ("gemm_rs copy_engine", check_sent, FENCE, "not fenced"),
        ("gemm_rs copy_engine", check_sent, WARPS, "no CTA barrier"),
        ("gemm_rs sm", check_sent, COMPLETE, "not complete"),
        ("gemm_rs sm", check_sent, FENCE, "not fenced"),
        ("gemm_rs sm", check_counted, COUNT, "not counted"),
        ("gemm_rs sm", check_counted, WARPS, "no CTA barrier between the count"),
        ("gemm_ar copy_engine", check_sent, COMPLETE, "not complete"),
        ("gemm_ar sm", check_counted, COUNT, "not counted"),
        ("gemm_ar engines", check_sent, COMPLETE, "not complete"),
        ("gemm_ar engines", check_sent, FENCE, "not fenced"),
        ("gemm_ar engines", check_sent, WARPS, "no CTA barrier"),
        ("gemm_exchange", check_sent, COMPLETE, "not complete"),
        ("gemm_exchange", check_sent, FENCE, "not fenced"),
        ("gemm_exchange", check_counted, COUNT, "not counted"),
        ("gemm_exchange", check_counted, WARPS, "no CTA barrier between the count"),
        ("signalled", check_sent, COMPLETE, "not complete"),
        ("signalled", check_sent, FENCE, "not fenced"),
        ("signalled", check_sent, WARPS, "no CTA barrier"),
        ("signalled", check_sent, LEFT, "no signal is released"),
        ("signalled", check_staging_tile, COMPLETE, "given back while TMA reads"),
        ("gathered", check_awaited, WARPS, "no CTA barrier"),
        ("gathered", check_awaited, FENCE, "not fenced"),
        ("gathered", check_awaited, CLOCK, "without a clock"),
        ("a2a_gemm", check_awaited, WARPS, "no CTA barrier"),
        ("a2a_gemm", check_awaited, FENCE, "not fenced"),
        ("a2a_gemm", check_awaited, CLOCK, "without a clock"),
        ("a2a_gemm", check_pushed, PARTITION, "no CTA barrier"),
        ("a2a_gemm", check_pushed, COUNT, "not counted"),
        ("a2a_gemm", check_staging_tile, SHARED_FENCE, "stores what is not fenced"),
        ("a2a_gemm", check_staging_tile, COMPLETE, "given back while TMA reads"),
        ("gemm_a2a", check_sent, COMPLETE, "not complete"),
        ("gemm_a2a", check_sent, FENCE, "not fenced"),
        ("gemm_a2a", check_sent, WARPS, "no CTA barrier"),
        ("gemm_a2a", check_counted, COUNT, "not counted"),
        ("ag_gemm plain", check_partials, PARTITION, "only one thread's stores"),
        ("ag_gemm plain", check_partials, COUNTED, "nobody hears"),
        ("ag_gemm plain", check_partials, AWAITED, "no partial is awaited"),
        ("ag_gemm plain", check_partials, CLOCK, "without a clock"),
        ("gemm_rs", check_partials, PARTITION, "only one thread's stores"),
        ("gemm_rs", check_partials, COUNTED, "nobody hears"),
        ("gemm_rs", check_partials, AWAITED, "no partial is awaited"),
        ("gemm_rs", check_partials, CLOCK, "without a clock"),
        ("gemm_rs sm", check_stages, SHARED_FENCE, "start is not fenced"),
        ("gemm_rs sm", check_staging_tile, SHARED_FENCE, "not fenced"),
        ("gemm_rs sm", check_staging_tile, PARTITION, "not all threads have staged"),
        ("gemm_rs sm", check_staging_tile, READ, "given back while TMA reads"),
    ],
)
def test_each_instruction_is_needed(compiled, kernel, check, removed, reason):
    """The shipped kernel less all instructions of one kind."""
    ptx = first_of(compiled, *kernel.split(), "bfloat16", "nt", "128x256")
    check_needed(check, ptx, removed, reason)


def test_a_fetched_tile_is_read_by_all_before_it_is_given_back(compiled):
    """The fence and the barrier between the last load of the tile and the arrival."""
    ptx = first_of(compiled, "gemm_rs", "copy_engine", "nt", "128x256")
    last = ptx.rindex("ldmatrix")
    arrival = ptx.index("mbarrier.arrive", last)
    for removed in (SHARED_FENCE, PARTITION):
        between = re.sub(rf"{removed}[^;\n]*", "", ptx[last:arrival])
        assert between != ptx[last:arrival], f"there is no {removed}"
        with pytest.raises(Misordered, match=r"ldmatrix|fence"):
            check_staging_tile(Ptx(ptx[:last] + between + ptx[arrival:]))


@pytest.mark.parametrize(
    ("kernel", "workers"),
    [
        (name, [1, 1, 2, 8])
        for name in ("gemm_rs", "gemm_ar", "gemm_exchange", "signalled", "a2a_gemm", "gemm_a2a")
    ]
    + [("ag_gemm", [4, 1, 2, 1, 4])],
)
def test_partitions_and_their_warps(compiled, kernel, workers):
    """Workers, those that fill up the last group of four warps, and the first that multiply. Tiles
    of 64 rows have no second group of them.
    """
    for name, result in named(compiled, kernel).items():
        made = workers[1:] if " 64x" in name else workers
        assert [warps for _, warps in parsed(result["ptx"]).partitions()] == made, name
