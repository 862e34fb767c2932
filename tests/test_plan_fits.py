"""A plan that is chosen can be launched: whatever M it was measured or raced at, and whatever M of
the range it is adapted to, an SM has the shared memory that its tile needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import plan_of
from ranks import DEVICE, on_device_ranks

from flux_megatron import ops, shipped
from flux_megatron.kernels import interpreter
from flux_megatron.kernels.shared_memory import stages_bytes
from flux_megatron.overlap import fused, low_latency_plans, registry
from flux_megatron.overlap.low_latency import MOST_ROWS
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import choice, plan_cache
from flux_megatron.tuning.plan_table import RANGES, PlanTable, for_rows, range_of

HOPPER_BYTES = 232_448  # of shared memory, that a CTA may have
SHAPES = [(8192, 8192), (5120, 5120), (12288, 12288), (4096, 14336), (28672, 8192), (640, 2560)]


@pytest.fixture(autouse=True)
def _a_hopper(monkeypatch):
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def needed_bytes(plan: Plan, problem: Problem) -> int:
    """What the kernel keeps in shared memory, as its own file says it: the stages of the operands,
    and results where they are stored by TMA.
    """
    tile, rows = plan.tile, plan.tile.block_m
    if plan.strategy in ("sequential", "pipelined"):
        return 0
    of_x = 1 if problem.dtype.startswith("float8") else 2
    of_y = 4 if problem.out_dtype == "float32" else 2
    results = tile.block_m * tile.block_n * of_y if tile.tma else 0
    if plan.strategy == "low_latency":
        rows, results = 16, 0  # a tile of all rows, whose words threads store
        while rows < problem.M:
            rows *= 2
        if rows <= 32:  # mma.sync: a stage is in registers
            tile = replace(tile, num_stages=tile.num_stages - 1)
    elif plan.strategy == "hopper" and problem.spec.gathers:
        results = tile.block_m * 64 * of_y  # at least one slice
    return tile.num_stages * (rows + tile.block_n) * tile.block_k * of_x + results


def assert_fits(plan: Plan, M: int, problem: Problem) -> None:
    adapted = for_rows(plan, M, problem)
    assert adapted.strategy == plan.strategy
    needed = needed_bytes(adapted, problem)
    assert needed <= HOPPER_BYTES, f"{problem}, raced at M={M}: {adapted} needs {needed} bytes"


def problems(M: int) -> Iterator[Problem]:
    for pattern, (N, K), layout in itertools.product(Pattern, SHAPES, ("nt", "nn")):
        yield Problem(pattern, M, N, K, "bfloat16", 2, layout)
        if M > 128 and pattern is not Pattern.GEMM_AR:  # which has no FP8
            for out_dtype in ("bfloat16", "float32"):
                scaled = {"out_dtype": out_dtype, "split_accumulator": layout == "nn"}
                yield Problem(pattern, M, N, K, "float8_e4m3fn", 2, **scaled)


def rows_of_range(number: int) -> list[int]:
    """M that some plan changes at, and some between."""
    every = [M for M in range(2, 20_000, 2) if range_of(M) == number]
    return every if len(every) < 50 else [*every[:: len(every) // 25], every[-1]]


@pytest.mark.parametrize("number", RANGES)
def test_every_candidate_fits_every_m_of_its_range(number):
    rows = rows_of_range(number)
    raced_at = {rows[0], 1 << number, rows[len(rows) // 2], rows[-1]}
    for M0 in sorted(raced_at):
        for problem in problems(M0):
            names = [*registry.STRATEGIES[problem.pattern]]
            if M0 > MOST_ROWS:
                names.remove("low_latency")
            for plan in (one for name in names for one in registry.candidates(problem, name)):
                most = MOST_ROWS if plan.strategy == "low_latency" else rows[-1]
                for M in (one for one in rows if one <= most):
                    assert_fits(plan, M0, replace(problem, M=M))


def test_every_shipped_plan_fits_every_m_of_its_range():
    read = 0
    for folder in (shipped.folder("configs") / "tuned").iterdir():
        for entry in plan_cache.read_folders(folder)[0]:
            read += 1
            for M in {*rows_of_range(range_of(entry.problem.M)), entry.problem.M}:
                problem = replace(entry.problem, M=M // 4 * 4)
                assert_fits(entry.plan, entry.problem.M, problem)
    assert read > 200


DECODING = Problem(Pattern.GEMM_AR, 64, 8192, 8192, "bfloat16", 2)


def test_a_plan_raced_at_fewer_rows_gives_way_to_one_that_fits():
    """64 columns in 5 stages of 128: 163,840 bytes of 64 rows, 245,760 of 128."""
    raced = low_latency_plans.default_plan(DECODING)
    table = PlanTable({64: raced})
    for M in range(46, 65):
        assert table.measured(replace(DECODING, M=M)) == raced
    for M in range(65, 91):
        problem = replace(DECODING, M=M)
        assert table.measured(problem) == low_latency_plans.default_plan(problem) != raced


LARGE = Tile(128, 256, 128, num_stages=4, tma=True)
REFUSED = "a tile of {} x 256 x 128 in 4 stages needs {} bytes of shared memory, an SM has 232448"


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fused", REFUSED.format(128, 459_776)),
        ("signalled", REFUSED.format(128, 459_776)),
        ("low_latency", REFUSED.format(64, 328_704)),
        ("hopper", "a tile of 128 x 256 x 128 in 4 stages leaves room for -10 slices of results"),
        ("pipelined", None), ("sequential", None), ("magic", "magic is not built for gemm_ar"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_its_bytes(strategy, reason):
    said = registry.why_not(DECODING, plan_of(strategy, tile=LARGE))
    assert (said is None) == (reason is None)
    assert said is None or said.startswith(reason)
    if strategy != "hopper":  # of which a CPU has none
        assert registry.why_not(replace(DECODING, device="cpu"), Plan("fused", tile=LARGE)) is None


@pytest.mark.parametrize(
    ("tile", "dtype", "capability", "compiled"),
    [
        (Tile(128, 64, 128, num_stages=5), "bfloat16", 9, 245_760),
        (Tile(64, 64, 128, num_stages=5), "bfloat16", 9, 163_840),
        (Tile(32, 64, 128, num_stages=5), "bfloat16", 9, 98_304),
        (Tile(128, 64, 128, num_stages=4), "bfloat16", 8, 147_456),
        (Tile(128, 128, 64, num_stages=4), "bfloat16", 10, 131_072),
        (Tile(128, 32, 32), "float32", 9, 40_960),
        (Tile(64, 64, 32), "float32", 8, 32_768),
        (Tile(128, 128, 128), "float8_e4m3fn", 9, 98_304),
        (Tile(128, 128, 128), "float8_e4m3fn", 8, 65_536),
        (Tile(64, 64, 32, num_stages=1), "bfloat16", 8, 8_192),
    ],
)
def test_the_stages_of_a_tile(tile, dtype, capability, compiled):
    """As Triton 3.7 compiles them, for sm_80, sm_89, sm_90 and sm_100."""
    assert stages_bytes(tile, getattr(torch, dtype).itemsize, capability) == compiled


def test_a_measured_plan_counts_where_the_strategys_own_does_not_fit(monkeypatch):
    small, space = Plan("fused", tile=Tile(16, 16, 16)), SimpleNamespace(missing=None)
    fits = {small}
    monkeypatch.setattr(
        fused, "why_not", lambda problem, plan: None if plan in fits else "too large"
    )
    monkeypatch.setattr(interpreter, "refuses", lambda: None)  # on a machine with GPUs
    problem = Problem(Pattern.AG_GEMM, 64, 32, 32, "float32", 2, device="cpu")
    own = fused.default_plan(problem)
    assert registry.refusal(problem, "fused", None) == "too large"
    assert registry.refusal(problem, "fused", None, small) is None
    table = PlanTable({64: small}, {*RANGES})
    assert choice.choose(problem, table, space) == (small, None)
    fits.clear()
    assert choice.choose(problem, table, space) == (Plan("pipelined"), None)
    fits.add(own)
    assert choice.choose(problem, table, space) == (own, None)


@on_device_ranks(2)
def test_a_given_plan_that_does_not_fit_is_refused_before_the_call(rank):
    """On every rank, and the group goes on with another."""
    x, w = torch.ones(8, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    small, refusals = Plan("fused", tile=Tile(16, 16, 16)), {LARGE: "a tile of much"}
    with mock.patch.object(fused, "why_not", lambda problem, plan: refusals.get(plan.tile)):
        with pytest.raises(ValueError, match="cannot run: a tile of much"):
            ops.gemm_reduce_scatter(x, w, dist.group.WORLD, plan=Plan("fused", tile=LARGE))
        y = ops.gemm_reduce_scatter(x, w, dist.group.WORLD, plan=small)
    assert torch.equal(y, torch.full_like(y, 8))


def test_what_does_not_fit_is_no_candidate(monkeypatch):
    plans = [Plan("fused"), Plan("fused", tile=LARGE)]
    monkeypatch.setattr(registry.strategy(DECODING, "fused"), "candidates", lambda problem: plans)
    assert plans[1] not in registry.candidates(DECODING, "fused")
    assert plans[0] in registry.candidates(DECODING, "fused")
