"""Calls captured in CUDA graphs, on GPUs: replayed any number of times, between eager calls, exact.

The protocol of captured calls is tested without GPUs in `protocol/test_virtual_ranks.py`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, Operands, operands
from closeness import assert_exact
from ranks import FUSED, GPU_RANKS, be_late, on_device, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.cuda_backend import CudaCopyEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

TILE = Tile(128, 256, 64, num_stages=3, tma=True)  # of the Hopper kernels
SEQUENTIAL = Plan("sequential")
PLANS = {
    "fused": Plan("fused", comm_rows=24, tile=Tile(64, 64, 32)),
    "pipelined": Plan("pipelined", comm_rows=24),
    "signalled": Plan("signalled", tile=Tile(64, 64, 32), group_rows=(24,), comm_sms=8),
    "sequential": SEQUENTIAL,
}
HOPPER = {
    "hopper": Plan("hopper", comm_rows=64, tile=TILE),
    "hopper by SM": Plan("hopper", comm_rows=40, tile=TILE, transport="sm"),
    "hopper by engines": Plan("hopper", comm_rows=64, tile=TILE, transport="engines"),
}
OPERATIONS = {
    "ag_gemm": ops.all_gather_gemm, "gemm_rs": ops.gemm_reduce_scatter,
    "gemm_ar": ops.gemm_all_reduce,
}  # fmt: skip


class Captured:
    """One call of each pattern on inputs that stay where they are."""

    def __init__(self, plan: Plan) -> None:
        self.group, self.rank = dist.group.WORLD, dist.get_rank()
        sizes = {"M_shard": 40, "N_local": 48, "K_local": 32}
        if plan.strategy == "hopper":
            K = 8 * 64 * (self.group.size() - 1)  # the least that its GEMM+RS takes
            # engines push sums of a shard of two tiles and more
            N = 264 if plan.transport == "engines" else 136
            sizes = {"M_shard": 128, "N_local": N, "K_local": K, "kept": 0.2}
        plans = dict.fromkeys(OPERATIONS, plan)
        if plan.strategy == "signalled":
            plans["ag_gemm"] = SEQUENTIAL
        if plan.transport == "engines":  # which push sums
            plans["ag_gemm"] = plans["gemm_rs"] = replace(plan, transport="copy_engine")
        self.cases = [
            Case(pattern, **sizes, dtype=torch.bfloat16, plan=one) for pattern, one in plans.items()
        ]
        self.inputs = [self._mine(operands(case, self.group.size())) for case in self.cases]

    def _mine(self, given: Operands) -> tuple[torch.Tensor, torch.Tensor]:
        return given.x[self.rank].cuda(), given.w[self.rank].cuda()

    def load(self, seed: int) -> list[torch.Tensor]:
        """New data of all ranks; what the calls must give."""
        expected = []
        for case, inputs in zip(self.cases, self.inputs, strict=True):
            given = operands(replace(case, seed=seed), self.group.size())
            for tensor, new in zip(inputs, self._mine(given), strict=True):
                tensor.copy_(new)
            expected.append(given.expected[self.rank])
        return expected

    def call(self) -> list[torch.Tensor]:
        return [
            OPERATIONS[case.pattern](*given, self.group, plan=case.plan)
            for case, given in zip(self.cases, self.inputs, strict=True)
        ]

    def graph(self) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """The calls captured, which have been made before, and their results."""
        self.call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, self.call()


def same(results: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    torch.cuda.synchronize()
    flux_megatron.check()
    for result, right in zip(results, expected, strict=True):
        assert_exact(result, right, what)


def replays(rank: int, plan: Plan) -> None:
    captured, draw = Captured(plan), random.Random(rank)
    captured.load(0)
    graph, results = captured.graph()
    seed = 0
    for count in (1, 2, 3, 7):
        for _ in range(count):
            seed += 1
            expected = captured.load(seed)
            if draw.random() < 0.4:
                be_late(draw.uniform(0, 0.01))
            graph.replay()
        same(results, expected, f"replay {seed}")
        for _ in range(count % 3):
            seed += 1
            expected = captured.load(seed)
            same(captured.call(), expected, f"eager {seed}")


@pytest.mark.parametrize("strategy", PLANS)
def test_replays_between_eager_calls(strategy):
    on_device(replays, min(4, GPU_RANKS), PLANS[strategy])


@pytest.mark.skipif(not ON_HOPPER, reason="`hopper` needs GPUs of compute capability 9")
@pytest.mark.parametrize("plan", HOPPER)
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_of_hopper_between_eager_calls(world_size, plan):
    on_device(replays, world_size, HOPPER[plan])


@on_device_ranks(2)
def test_growth_after_a_capture(rank):
    """A graph keeps the memory that it was captured with, whatever later calls need."""
    captured = Captured(PLANS["fused"])
    expected = captured.load(0)
    graph, results = captured.graph()
    x = torch.ones(4096, 64, dtype=torch.bfloat16, device="cuda")
    w = torch.ones(32, 64, dtype=x.dtype, device="cuda")
    big = ops.all_gather_gemm(x, w, captured.group, plan=PLANS["fused"])
    graph.replay()
    same([*results, big], [*expected, torch.full((8192, 32), 64.0, dtype=x.dtype)], "after growth")


@on_device_ranks(2, environment=FUSED)
def test_a_capture_that_would_need_memory_is_refused(rank):
    x = torch.ones(32, 64, device="cuda", requires_grad=True)
    w = torch.ones(16, 64, device="cuda")
    column_parallel_linear(x[:16], w, None, group=dist.group.WORLD)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(errors.WorkspaceError, match="make the same call once before"),
        torch.cuda.graph(graph),
    ):
        column_parallel_linear(x.repeat(1000, 1), w, None, group=dist.group.WORLD)


@pytest.mark.gpu
@on_device_ranks(1)
def test_a_thread_that_has_not_used_a_gpu_yet_makes_an_engine(rank):
    """An engine is made where the process has a context and the thread has none, as in backward."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.Stream(device, priority=-1)  # torch keeps a pool, from which the engine's comes
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(CudaCopyEngine, device).result()
    engine.fork()
    engine.join()
    torch.cuda.synchronize(device)
    assert engine.capture(engine.current()) == 0
