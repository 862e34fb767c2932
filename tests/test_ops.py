"""The two operations in real processes: exact on integers, else as close to fp64 as plain torch."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, Operands, call, check, check_all, expected, hopper_cases
from closeness import assert_as_close_as
from ranks import DEVICE, FUSED, SHARED, be_late, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.overlap import calls, transfer
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import copies

PATTERNS = ["ag_gemm", "gemm_rs"]
STRATEGIES = ["fused", "pipelined", "sequential"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["nt", "nn"]
ASKED = {"FLUX_MEGATRON_STRATEGY": "{strategy}"}  # of calls without a plan
NO_FLOAT64 = "dtype float64 is none of float32, bfloat16, float16"
# (M_shard, N_local, K_local): single elements, below, at and beyond one tile
SHAPES = [(1, 1, 1), (16, 16, 16), (13, 7, 5), (33, 18, 24), (20, 33, 17), (70, 17, 19)]
SMALL, WIDE, TALL = Tile(16, 16, 16), Tile(16, 64, 32, group_m=1), Tile(64, 16, 16, group_m=2)
# communication tiles: the shard, one row (more than there are slots for 70 rows), ragged, too large
TILES = {0: SMALL, 1: SMALL, 7: WIDE, 24: TALL, 1000: TALL}
PLANS = {
    "fused": [None, *(Plan("fused", rows, tile) for rows, tile in TILES.items())],
    "pipelined": [
        *(Plan("pipelined", rows) for rows in (0, 1, 7, 1000)), Plan("pipelined", gemms=1)
    ],
    "sequential": [Plan("sequential")],
}  # fmt: skip


def cases_of(pattern: str, strategy: str, count: int) -> list[Case]:
    """`count` of all combinations, the same ones each time, in no order."""
    combinations = itertools.product(SHAPES, PLANS[strategy], DTYPES, LAYOUTS, [False, True])
    chosen = random.Random(f"{pattern} {strategy}").sample(
        [c for c in combinations if pattern == "ag_gemm" or not c[4]], count
    )
    return [
        Case(pattern, *shape, dtype=dtype, layout=layout, bias=bias, plan=plan, seed=seed)
        for seed, (shape, plan, dtype, layout, bias) in enumerate(chosen)
    ]


def check_by(strategy: str, cases: list[Case]) -> None:
    check_all(cases)
    counted = Counter((case.pattern, strategy) for case in cases)
    assert flux_megatron.report().calls == counted


WORLDS = [  # of four and eight ranks, whose forks take seconds, not every strategy
    *itertools.product([1, 2, 3], PATTERNS, STRATEGIES),
    *itertools.product([4, 8], PATTERNS, ["fused"]), (4, "ag_gemm", "pipelined"),
    (8, "gemm_rs", "pipelined"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "pattern", "strategy"), WORLDS)
@on_device_ranks("world_size", environment=ASKED)
def test_exact(rank, world_size, pattern, strategy):
    count = {1: 24, 2: 24, 3: 18, 4: 12, 8: 6}[world_size]
    cases = cases_of(pattern, strategy, min(count, 12 if strategy == "sequential" else 24))
    if world_size == 1:  # without a plan one rank has nothing to overlap
        cases = [replace(c, plan=c.plan or Plan("fused")) for c in cases]
    check_by(strategy, cases)


@pytest.mark.skipif(not ON_HOPPER, reason="`hopper` needs GPUs of compute capability 9")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("world_size", [2, 4])
@on_device_ranks("world_size")
def test_hopper_is_exact(rank, world_size, pattern):
    check_by("hopper", hopper_cases(pattern, world_size))


@on_device_ranks(2)
def test_where_sms_copy_one_cta_waits_before_the_reduction(rank):
    """The CTAs of the reduction might hold all of them, also those for this rank's own pushes,
    before its own signal.
    """
    wait = mock.patch.object(transfer, "wait_sources", wraps=transfer.wait_sources)
    with mock.patch.object(copies, "spare_sms", return_value=copies.SMS), wait as waited:
        for pattern in ("gemm_rs", "gemm_ar"):
            flux_megatron.reset_report()
            check_all(Case(pattern, 40, 24, 16, plan=plan) for plan in PLANS["pipelined"])
            waits = flux_megatron.report().kernels["wait_sources"]
            reductions = flux_megatron.report().kernels["reduce_received"]
            gathers = len(PLANS["pipelined"]) if pattern == "gemm_ar" else 0
            assert waits == reductions + gathers == len(PLANS["pipelined"]) + gathers
    counts = [one.kwargs["count"] for one in waited.mock_calls]
    assert counts.count(2) == 2 * len(PLANS["pipelined"])


@on_device_ranks(2)
def test_a_plan_with_tma_holds_for_unaligned_rows(rank):
    plan = Plan("fused", tile=replace(SMALL, tma=True))
    for pattern, layout, (N, K) in itertools.product(PATTERNS, LAYOUTS, [(16, 30), (10, 32)]):
        check(Case(pattern, 6, N, K, dtype=torch.bfloat16, layout=layout, plan=plan))


def test_every_dtype_layout_shape_and_plan_is_drawn():
    for pattern, strategy in itertools.product(PATTERNS, ("fused", "pipelined")):
        drawn = cases_of(pattern, strategy, 24)
        assert {(c.M_shard, c.N_local, c.K_local) for c in drawn} == set(SHAPES)
        assert {c.plan for c in drawn} == set(PLANS[strategy])
        assert {(c.dtype, c.layout) for c in drawn} == {*itertools.product(DTYPES, LAYOUTS)}


# on GPUs too few rows to overlap; interpreted, nothing is known and the first strategy runs
CHOSEN = "fused" if DEVICE == "cpu" else "sequential"
UNKNOWN = pytest.mark.skipif(SHARED, reason="one GPU has no link to itself: nothing is predicted")


@pytest.mark.parametrize(
    ("world_size", "strategy", "runs"),
    [(1, "auto", "sequential"), pytest.param(2, "auto", CHOSEN, marks=UNKNOWN),
     *[(2, strategy, strategy) for strategy in STRATEGIES]],
)  # fmt: skip
@on_device_ranks("world_size", environment=ASKED)
def test_the_strategy_setting_decides_where_there_is_something_to_overlap(rank, runs):
    kinds = itertools.product(PATTERNS, DTYPES, LAYOUTS)
    check_by(runs, [Case(p, 40, 24, 16, dtype=dtype, layout=layout) for p, dtype, layout in kinds])


@on_device_ranks(2)
def test_float64_falls_back_and_says_why(rank):
    for pattern in PATTERNS:  # of more rows than `low_latency` takes, whose reason that is
        check(Case(pattern, 72, 5, 7, dtype=torch.float64))
        check(Case(pattern, 72, 5, 7, dtype=torch.float64, seed=1))
    report = flux_megatron.report()
    assert report.calls == {(pattern, "sequential"): 2 for pattern in PATTERNS}
    assert report.fallbacks == {(pattern, NO_FLOAT64): 2 for pattern in PATTERNS}


@on_device_ranks(2, environment=FUSED | {"FLUX_MEGATRON_STRICT": "1"})
def test_strict_mode_refuses_float64_and_nothing_else(rank):
    """Before the call, so no rank has begun it."""
    for pattern in PATTERNS:
        begun = mock.patch.object(calls, "InFlight", side_effect=KeyError)
        said = f"^{pattern} cannot be overlapped: {NO_FLOAT64}$"
        with begun, pytest.raises(errors.FallbackRefused, match=said):
            check(Case(pattern, 6, 5, 7, dtype=torch.float64))
        assert flux_megatron.report().fallbacks == {}
        check_by("fused", [Case(pattern, 6, 5, 7)])
        flux_megatron.reset_report()


def random_operands(case: Case, world_size: int) -> Operands:
    """Normally distributed; `expected` is the reference in fp64."""
    generator = torch.Generator().manual_seed(case.seed)

    def shards(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(case.dtype) for _ in range(world_size)]

    gathers = case.pattern == "ag_gemm"
    x = shards(case.M_shard * (1 if gathers else world_size), case.K_local)
    w = shards(case.N_local, case.K_local)
    bias = shards(case.N_local) if case.bias else None
    wide = [[t.double() for t in shard] for shard in (x, w, bias or [])]
    return Operands(x, w, bias, expected(case, *wide))


def plain_torch(case: Case, given: Operands, rank: int) -> torch.Tensor:
    """What a user would write in the same dtype, on one device."""
    x, w = ([t.to(DEVICE) for t in shards] for shards in (given.x, given.w))
    if case.pattern == "ag_gemm":
        y = torch.cat(x) @ w[rank].t()
        return y + given.bias[rank].to(DEVICE) if given.bias else y
    total = x[0] @ w[0].t()
    for a, b in zip(x[1:], w[1:], strict=True):
        total = total + a @ b.t()
    return total.chunk(len(x))[rank]


@pytest.mark.parametrize("world_size", [2, 4])
@on_device_ranks("world_size", environment=FUSED)
def test_random_data_is_as_close_as_plain_torch(rank):
    group = dist.group.WORLD
    plans = None, Plan("fused", comm_rows=24, tile=Tile(32, 32, 32)), Plan("pipelined")
    for pattern, dtype, plan in itertools.product(PATTERNS, DTYPES, plans):
        case = Case(pattern, 65, 50, 129, dtype=dtype, bias=pattern == "ag_gemm", plan=plan)
        given = random_operands(case, group.size())
        baseline = plain_torch(case, given, rank)
        assert_as_close_as(call(case, given, group), baseline, given.expected[rank], str(case))


@on_device_ranks(3)
def test_the_sum_does_not_depend_on_who_is_late(rank):
    group = dist.group.WORLD
    case = Case("gemm_rs", 40, 24, 64, dtype=torch.float32, plan=Plan("fused", 7, Tile(16, 16, 16)))
    given = random_operands(case, group.size())
    first = call(case, given, group)
    for late in range(group.size()):
        if rank == late:
            be_late(0.05)
        assert torch.equal(call(case, given, group), first), f"rank {late} was late"


@pytest.mark.parametrize("strategy", ["sequential", "pipelined", "fused", "signalled"])
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_a_bias_alone_that_needs_a_gradient_makes_y_need_one(rank, strategy):
    x, w = torch.ones(4, 16, device=DEVICE), torch.ones(8, 16, device=DEVICE)
    bias = torch.ones(8, device=DEVICE, requires_grad=True)
    assert ops.all_gather_gemm(x, w, dist.group.WORLD, bias=bias).requires_grad
