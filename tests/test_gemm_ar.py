"""GEMM+AR: exact against the reference, refused or counted where it cannot overlap, measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, check_all, operands
from closeness import assert_exact
from ranks import DEVICE, here, on_device, on_device_ranks

import flux_megatron
from flux_megatron import ops, pieces
from flux_megatron.kernels.hopper.config import TILE
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.lab.perf.hardware import H200
from flux_megatron.lab.perf.linear import operator_us
from flux_megatron.lab.perf.operator_cost import gemms_us
from flux_megatron.overlap import hopper
from flux_megatron.patterns import Pattern
from flux_megatron.problem import TRANSPORTS, Plan, Problem, Tile
from flux_megatron.symm.workspaces import workspace

PLANS = {
    "sequential": Plan("sequential"),
    "pipelined": Plan("pipelined"),
    "fewest GEMMs": Plan("pipelined", gemms=1),
    "communication tiles": Plan("pipelined", comm_rows=2),
    "fused": Plan("fused", tile=Tile(16, 16, 16)),
}
SIZES = [(4, 5, 8), (3, 16, 7), (1, 1, 1)]  # M_shard, N, K_local


@pytest.mark.parametrize(
    ("plan", "world_size"),
    [("sequential", 1), *itertools.product(PLANS, (2, 3)), ("fused", 4), ("fewest GEMMs", 8)],
)
@on_device_ranks("world_size")
def test_exact(rank, plan):
    flux_megatron.reset_report()
    # the second turn through the other half of the workspace
    kinds = itertools.product(range(2), SIZES, (torch.float32, torch.bfloat16), ("nt", "nn"))
    made = [
        Case("gemm_ar", M_shard, N, K, dtype, layout, plan=PLANS[plan])
        for _, (M_shard, N, K), dtype, layout in [*kinds][:: max(1, dist.get_world_size() - 3)]
    ]
    check_all(made)
    counted = {name: count for (_, name), count in flux_megatron.report().calls.items()}
    assert counted == {PLANS[plan].strategy: len(made)}


def sum_of_unequal(rank: int, plans: list[Plan]) -> None:
    """Partials 256, 1, 1, 1 in bf16: 259 in fp32 is 260; 256, where each addition is rounded."""
    group = dist.group.WORLD
    x = torch.ones(group.size(), 1, dtype=torch.bfloat16, device=DEVICE)
    w = torch.full((16, 1), 1.0 if rank else 256.0, dtype=torch.bfloat16, device=DEVICE)
    for plan in plans:
        for operation in (ops.gemm_all_reduce, ops.gemm_reduce_scatter):
            y = operation(x, w, group, plan=plan).float()
            assert_exact(y, torch.full_like(y, 260.0), f"{operation.__name__} by {plan}")


def test_sums_are_rounded_once():
    overlapping = [plan for plan in PLANS.values() if plan.strategy != "sequential"]
    on_device(sum_of_unequal, 4, overlapping)


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_rows_that_cannot_be_divided_are_reduced_without_overlap(rank):
    group = dist.group.WORLD
    x, w = (torch.ones(shape, device=DEVICE) for shape in ((5, 4), (3, 4)))
    for strategy in ("pipelined", "fused"):
        with pytest.raises(ValueError, match="5 rows cannot be divided over 2 ranks"):
            ops.gemm_all_reduce(x, w, group, plan=Plan(strategy))
    with pytest.raises(ValueError, match="'eager' given"):
        ops.gemm_all_reduce(x, w, group, plan=Plan("eager"))
    assert_exact(ops.gemm_all_reduce(x, w, group), torch.full((5, 3), 8.0))
    reasons = [reason for _, reason in flux_megatron.report().fallbacks]
    assert reasons == ["5 rows cannot be divided over 2 ranks"]


@pytest.mark.skipif(not ON_HOPPER, reason="`hopper` needs GPUs of compute capability 9")
@pytest.mark.parametrize("world_size", [2, 4])
@on_device_ranks("world_size")
def test_of_the_last_rank_hopper_sums_fewer_rows(rank):
    R = dist.get_world_size()
    for M, transport, layout in itertools.product((257, 2049, 3333), TRANSPORTS, ("nt", "nn")):
        plan = Plan("hopper", tile=replace(TILE, group_m=16), transport=transport, comm_rows=512)
        sizes = cdiv(M, R), 264, 416 // R, torch.bfloat16, layout
        check_all([Case("gemm_ar", *sizes, plan=plan, lacking=-M % R)] * 3)


@pytest.mark.parametrize(("M", "R", "fewer"), [(3333, 2, True), (5, 4, False), (9, 8, False)])
def test_hopper_needs_a_row_for_each_rank(M, R, fewer, monkeypatch):
    monkeypatch.setattr(hopper.hopper_gemm, "supports", lambda problem: None)
    problem = Problem(Pattern.GEMM_AR, M, 264, 400, "bfloat16", R)
    refusal = None if fewer else f"{M} rows cannot be divided over {R} ranks"
    assert hopper.supports(problem) == refusal
    assert hopper.supports(replace(problem, pattern=Pattern.GEMM_RS)) is not None


@on_device_ranks(2)
def test_the_sums_are_on_their_way_between_start_and_finish(rank):
    group = dist.group.WORLD
    given = operands(Case("gemm_ar", 3, 5, 8, layout="nn"), group.size())
    x, w, expected = (one[rank].to(DEVICE) for one in (given.x, given.w, given.expected))
    for strategy in ("pipelined", "fused"):
        plan = Plan(strategy)
        ops.run_gemm_ar(x, w, group, layout="nn", plan=plan)
        channels = workspace(group, here()).channels
        before = channels["scatter"].epoch, channels["gather"].epoch
        reduction = pieces.start_gemm_ar(x, w, group, layout="nn", plan=plan)
        begun = channels["scatter"].epoch, channels["gather"].epoch
        assert begun == (before[0] + 1, before[1] + 1), "the gather hides behind what comes now"
        assert_exact(reduction.finish(), expected)
    reduction = pieces.start_gemm_ar(x, w, group, layout="nn", plan=Plan("sequential"))
    assert len(reduction.works) == 1, "the library's"
    assert_exact(reduction.finish(), expected)


def test_in_a_backward_wgrad_hides_the_second_trip():
    """Of Megatron's both, beside what its kernels take from wgrad."""
    forward = Problem(Pattern.GEMM_AR, 8192, 8192, 28672, "bfloat16", 4)
    backward = replace(forward, layout="nn")
    for strategy in ("megatron", "pipelined", "hopper"):
        exposed = [
            operator_us(one, strategy, H200) - sum(gemms_us(one, H200))
            for one in (forward, backward)
        ]
        assert 0 < exposed[1] < 0.6 * exposed[0], strategy
