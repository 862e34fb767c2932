"""GEMM+AR: exact against the reference, refused or counted where it cannot overlap, measured."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, assert_sums_exact, small_integers
from ranks import DEVICE, on_device, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import flux_megatron
from flux_megatron import ops, reference
from flux_megatron.bench import records, runner
from flux_megatron.bench.options import Options
from flux_megatron.patterns import Pattern
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Plan, Problem
from flux_megatron.tuning import tuner

PLANS = {
    "sequential": Plan("sequential"),
    "pipelined": Plan("pipelined"),
    "fewest GEMMs": Plan("pipelined", splits=1),
    "communication tiles": Plan("pipelined", comm_rows=2),
}
SIZES = [(4, 5, 8), (3, 16, 7), (1, 1, 1)]  # M_shard, N, K_local


def operands(M, N, K_local, world_size, dtype, layout):
    made = torch.Generator().manual_seed(M)
    x = [small_integers((M, K_local), dtype, made) for _ in range(world_size)]
    shape = (N, K_local) if layout == "nt" else (K_local, N)
    w = [small_integers(shape, dtype, made) for _ in range(world_size)]
    columns = [shard.t() if layout == "nt" else shard for shard in w]
    assert_sums_exact(torch.cat(x, 1), torch.cat(columns))
    return x, w, reference.gemm_all_reduce(x, w, layout)


def calls(rank: int, plan: Plan) -> dict[str, int]:
    group = dist.group.WORLD
    flux_megatron.reset_report()
    results = []
    for turn in range(2):  # the second time through the other half of the workspace
        for M_shard, N, K_local in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                for layout in ("nt", "nn"):
                    M = M_shard * group.size()
                    xs, ws, expected = operands(M, N, K_local, group.size(), dtype, layout)
                    x, w = xs[rank].to(DEVICE), ws[rank].to(DEVICE)
                    y = ops.gemm_all_reduce(x, w, group, layout=layout, plan=plan)
                    results.append((y, expected[rank], f"{turn} {M_shard} {N} {dtype} {layout}"))
    for y, expected, what in results:  # all of them now: later calls leave results alone
        assert_exact(y, expected, what)
    return {name: count for (_, name), count in flux_megatron.report().calls.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_exact(world_size, plan):
    if world_size == 1 and plan != "sequential":
        pytest.skip("one rank has nobody to send to")
    for counted in on_device(calls, world_size, PLANS[plan]):
        assert counted == {PLANS[plan].strategy: 2 * len(SIZES) * 4}


def ragged(rank: int) -> list[str]:
    group = dist.group.WORLD
    x, w = (torch.ones(shape, device=DEVICE) for shape in ((5, 4), (3, 4)))
    with pytest.raises(ValueError, match="5 rows cannot be divided over 2 ranks"):
        ops.gemm_all_reduce(x, w, group, plan=Plan("pipelined"))
    with pytest.raises(ValueError, match="'fused' given"):
        ops.gemm_all_reduce(x, w, group, plan=Plan("fused"))
    assert_exact(ops.gemm_all_reduce(x, w, group), torch.full((5, 3), 8.0))
    return [reason for _, reason in flux_megatron.report().fallbacks]


def test_rows_that_cannot_be_divided_are_reduced_without_overlap():
    wanted = {"FLUX_MEGATRON_STRATEGY": "pipelined"}
    for reasons in on_device(ragged, 2, environment=wanted):
        assert reasons == ["5 rows cannot be divided over 2 ranks"]


def missing(rank: int) -> list[str]:
    x, w = (torch.ones(shape, device=DEVICE) for shape in ((6, 4), (3, 4)))
    group = dist.group.WORLD
    compiled = torch.compile(ops.gemm_all_reduce, backend="eager", fullgraph=True)
    for operation in (ops.gemm_all_reduce, compiled):  # the second through the operator of torch
        assert_exact(operation(x, w, group), torch.full((6, 3), 8.0))
    return [reason for _, reason in flux_megatron.report().fallbacks]


def test_a_strategy_that_is_not_built_falls_back_and_says_so():
    for reasons in on_device(missing, 2, environment={"FLUX_MEGATRON_STRATEGY": "fused"}):
        assert reasons == ["fused is not built for gemm_ar"]


def measured(rank: int):
    device = torch.empty(0, device=DEVICE).device
    problem = Problem(Pattern.GEMM_AR, 64, 32, 64, "float32", 2, device=DEVICE)
    plans = tuner.candidates(problem, ["pipelined"], None)
    return tuner.measure(problem, plans, dist.group.WORLD, device, seconds=60)


def test_the_tuner_measures_it():
    first, second = on_device(measured, 2)
    assert first == second
    assert not first.failed
    assert {(one.plan.strategy, one.plan.splits) for one in first.measured} == {
        ("sequential", 0), ("pipelined", 0), ("pipelined", 1),
    }  # fmt: skip


def test_operator_has_the_shape_of_the_result():
    with FakeTensorMode():
        x, w = torch.empty(6, 4), torch.empty(4, 3)
        y = ops._gemm_all_reduce(x, w, "no group is asked", "nn", "")
    assert y.shape == (6, 3)


def benched(rank: int, file: str) -> None:
    options = Options(
        ("llama2-70b",), ("gemm_ar",), (32,), file, rounds=2, tp=2, device="cpu", scale=512
    )
    runner.run(options, dist.group.WORLD, torch.device("cpu"), lambda case, rows: None)


def test_the_bench_measures_it_beside_the_all_reduce(tmp_path):
    run_ranks(benched, 2, str(tmp_path / "rows.jsonl"))
    rows = records.load(tmp_path / "rows.jsonl")
    right = {(row.op, row.candidate) for row in rows if row.status == records.OK}
    names = ("gemm", "serial", "sequential", "pipelined", "auto")
    assert right >= {(op, name) for op in ("proj", "fc2") for name in names}


def test_an_all_reduce_is_predicted_to_take_two_trips():
    def us(pattern: Pattern, strategy: str) -> float:
        problem = Problem(pattern, 8192, 8192, 28672, "bfloat16", 4)
        return predict_us(problem, Plan(strategy), H200)

    for strategy in ("sequential", "pipelined"):
        assert us(Pattern.GEMM_AR, strategy) > us(Pattern.GEMM_RS, strategy)
    assert us(Pattern.GEMM_AR, "pipelined") < us(Pattern.GEMM_AR, "sequential")
