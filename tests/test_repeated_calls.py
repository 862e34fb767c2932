"""Repeated calls on GPUs, which lists of driver calls make: exact, with operands that move and
ranks that are late. `test_calls.py` and `protocol/test_offline_calls.py` need no GPU.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, call, operands
from closeness import assert_exact
from layer_cases import check, layer
from races import agreed
from ranks import GPU_RANKS, be_late, on_cpu_ranks
from test_fp8 import E4M3, Layer, fp8

import flux_megatron
from flux_megatron.overlap import calls, registry
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.symm.workspaces import workspaces

pytestmark = [pytest.mark.gpus(2), pytest.mark.skipif(GPU_RANKS < 2, reason="needs two GPUs")]

WIDE = Tile(128, 256, 64, num_stages=3, tma=True)  # of the Hopper kernels
THIN = Tile(16, 64, 64, num_warps=4)
PLANS = {
    "fused": Plan("fused", comm_rows=100, tile=Tile(64, 64, 32)),
    "fused, TMA": Plan("fused", tile=Tile(128, 128, 64, tma=ON_HOPPER)),
    "pipelined": Plan("pipelined", comm_rows=100),
    "pipelined, one GEMM": Plan("pipelined", gemms=1),
}
FEW = {
    "low_latency": Plan("low_latency", tile=THIN),
    "low_latency, TMA": Plan("low_latency", tile=replace(THIN, tma=ON_HOPPER)),
    "low_latency, parts": Plan("low_latency", tile=replace(THIN, num_stages=4), k_parts=3),
}
if ON_HOPPER:
    PLANS |= {
        "hopper": Plan("hopper", comm_rows=128, tile=WIDE, transport="copy_engine"),
        "hopper, rows in parts of K": Plan("hopper", tile=WIDE, k_parts=4),
        "hopper by SM": Plan("hopper", comm_rows=128, tile=WIDE, transport="sm"),
    }
CALLS = 60


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Whether C has made each call of a program."""
    begin, by_list = calls.InFlight.__init__, []

    def noted(self, *given) -> None:
        begin(self, *given)
        by_list.append(self._lists is not None)

    with mock.patch.object(calls.InFlight, "__init__", noted):
        yield by_list
    unlisted = [p.unlisted for space in workspaces() for p in space.programs.values()]
    assert all(not one or "not compiled yet" in one for one in unlisted), unlisted


@pytest.mark.parametrize("plan", [*PLANS, *FEW])
@on_cpu_ranks(2, device="cuda")
def test_repeated_calls_are_exact(rank, plan):
    plan = (PLANS | FEW)[plan]
    rows = 16 if plan.strategy == "low_latency" else 256
    sizes = {"M_shard": rows, "N_local": 512, "K_local": 1024, "dtype": torch.bfloat16, "kept": 0.2}
    cases = [
        Case(pattern, **sizes, plan=plan, seed=seed)
        for pattern in ("ag_gemm", "gemm_rs")
        for seed in range(4)
    ]
    given, draw, mine = [operands(case, 2) for case in cases], random.Random(0), random.Random(rank)
    with counted() as by_list:
        results = []
        for _ in range(CALLS):
            which = draw.randrange(len(cases))
            if mine.random() < 0.1:
                be_late(0.002)
            results.append((which, call(cases[which], given[which], dist.group.WORLD)))
    torch.cuda.synchronize()
    flux_megatron.check()
    for number, (which, result) in enumerate(results):
        assert_exact(result, given[which].expected[rank], f"call {number}")
    assert agreed(sum(by_list)) >= CALLS - 10


STEPS = 20


@pytest.mark.parametrize("strategy", sorted({plan.strategy for plan in PLANS.values()}))
@on_cpu_ranks(2, device="cuda", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_repeated_layers_are_exact(rank):
    sizes = ((64, 2), 1024, 1024)  # K of a rank is what GEMM+RS of `hopper` needs at least
    both = [layer(kind, 2, torch.bfloat16, *sizes, False, 0.3) for kind in ("column", "row")]
    with counted() as by_list:
        for _ in range(STEPS):
            if random.random() < 0.1:
                be_late(0.002)
            for one in both:
                check(one, rank, "xw")
    flux_megatron.check()
    # two calls forward; backward, the gather and the scatter of one layer, and the other's gather
    assert agreed(sum(by_list)) >= 5 * (STEPS - 7)


def few(generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """One in five is not 0, so that sums of 1024 products are exact in bf16."""
    kept = torch.rand(rows, columns, generator=generator) < 0.2
    return (fp8(generator, rows, columns, dtype).float() * kept).to(dtype)


@pytest.mark.parametrize("strategy", ["fused", *(["hopper"] if ON_HOPPER else [])])
@on_cpu_ranks(2, device="cuda")
def test_repeated_fp8_calls_are_exact(rank, strategy):
    """Calls of both operations, each with scales of its own, which two programs serve."""
    layers = [
        Layer(pattern, (256, 512, 1024), E4M3, torch.bfloat16, 2, drawn=few)
        for pattern in ("ag_gemm", "gemm_rs")
    ]
    expected = [one.expected()[rank] for one in layers]
    with counted() as by_list:
        for number, which in itertools.product(range(STEPS), range(2)):
            one, factor = layers[which], 2.0 ** (number % 3)
            problem = Problem.of_operands(
                Pattern(one.pattern), len(one.x[0]), 512, 1024, "float8_e4m3fn", 2, "nt", "cuda",
                out_dtype="bfloat16",
            )  # fmt: skip
            plan = registry.strategy(problem, strategy).default_plan(problem)
            with mock.patch.object(one, "x_scale", [factor * scale for scale in one.x_scale]):
                y = one.call(plan)
            assert_exact(y, factor * expected[which], f"{one.pattern} {number}")
    flux_megatron.check()
    assert sum(len(space.programs) for space in workspaces()) == 2
    assert agreed(sum(by_list)) >= 2 * (STEPS - 2)
