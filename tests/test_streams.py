"""Calls of two groups, and of both directions, on real streams of a GPU: none waits for another's
turn, and all are exact.
"""

import random
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import Case, call, operands
from closeness import assert_exact
from ranks import GPU_RANKS, be_late, on_cpu_ranks

import flux_megatron
from flux_megatron import ops, pieces
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.problem import Plan, Tile
from flux_megatron.wgrad import plain_wgrad

pytestmark = [pytest.mark.gpus(2), pytest.mark.skipif(GPU_RANKS < 2, reason="needs two GPUs")]

FUSED, PIPELINED = Plan("fused", tile=Tile(64, 64, 32)), Plan("pipelined")
PLANS = {
    "fused": (FUSED, FUSED),
    "pipelined": (PIPELINED, PIPELINED),
    "mixed": (FUSED, PIPELINED),
    "signalled": (FUSED, replace(FUSED, strategy="signalled", group_rows=(256, 512), comm_sms=8)),
    "chosen": (None, None),  # `hopper` where it can run
}
CALLS = 200


def _cases(plans) -> list[Case]:
    """Large enough that a kernel fills the GPU."""
    sizes = {"M_shard": 1024, "N_local": 2048, "K_local": 512, "dtype": torch.bfloat16, "kept": 0.5}
    ag, rs = plans
    return [Case("ag_gemm", **sizes, plan=ag), Case("gemm_rs", **sizes, plan=rs)]


def _done() -> None:
    torch.cuda.synchronize()
    flux_megatron.check()


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@on_cpu_ranks(2, device="cuda")
def test_two_groups_on_three_streams(rank, plans):
    groups = dist.group.WORLD, dist.new_group([0, 1])
    streams = [torch.cuda.Stream() for _ in range(3)]
    cases = _cases(plans)
    given = [operands(case, 2) for case in cases]
    for case, operand in zip(cases, given, strict=True):  # memory is had, and kernels compiled
        for group in groups:
            call(case, operand, group)
    _done()
    draw, mine, results = random.Random(0), random.Random(1 + rank), []
    for _ in range(CALLS):
        which, group, stream = draw.randrange(2), draw.randrange(2), draw.randrange(3)
        with torch.cuda.stream(streams[stream]):
            if mine.random() < 0.05:
                be_late(0.002)
            results.append((which, call(cases[which], given[which], groups[group])))
    _done()
    for number, (which, result) in enumerate(results):
        assert_exact(result, given[which].expected[rank], f"call {number}")


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@on_cpu_ranks(2, device="cuda")
def test_a_gather_beside_an_open_scatter_of_another_group(rank, plans):
    """Gated pushes of one group stand in the copy engine's stream while the other group gathers."""
    groups = dist.group.WORLD, dist.new_group([0, 1])
    first, second = (torch.cuda.Stream() for _ in range(2))
    ag, rs = _cases(plans)
    given_ag, given_rs = operands(ag, 2), operands(rs, 2)
    x, w = given_rs.x[rank].cuda(), given_rs.w[rank].cuda()
    torch.cuda.synchronize()
    for number in range(CALLS):
        with torch.cuda.stream(first):
            if number % 7 == rank:
                be_late(0.002)
            scatter = pieces.start_gemm_rs(x, w, groups[0], plan=rs.plan)
        with torch.cuda.stream(second):
            y = call(ag, given_ag, groups[1])
        with torch.cuda.stream(first):
            dx = scatter.finish()
    _done()
    assert_exact(y, given_ag.expected[rank])
    assert_exact(dx, given_rs.expected[rank])


@on_cpu_ranks(2, device="cuda")
def test_backward_on_autograd_s_thread(rank):
    """Autograd's thread enqueues on the forward's stream what the main thread goes on behind."""
    groups = dist.group.WORLD, dist.new_group([0, 1])
    forward, other = torch.cuda.Stream(), torch.cuda.Stream()
    options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    x, w = (torch.ones(rows, 512, **options) for rows in (1024, 2048))
    ag, _ = _cases((None, None))
    given = operands(ag, 2)
    threads = set()

    def wgrad(w, dy, x):
        threads.add(threading.get_ident())
        return plain_wgrad(w, dy, x)

    torch.cuda.synchronize()
    for _ in range(20):
        x.grad = w.grad = None
        with torch.cuda.stream(forward):
            if rank:
                be_late(0.001)
            y = column_parallel_linear(x, w, None, group=groups[0], wgrad=wgrad)
            loss = y.sum()
        with torch.cuda.stream(other):
            call(ag, given, groups[1])
            loss.backward()
            result = call(ag, given, groups[1])
    _done()
    assert threads != {threading.get_ident()}, "backward ran on the main thread"
    assert_exact(result, given.expected[rank])
    assert_exact(x.grad, torch.full_like(x, 2 * 2048))
    assert_exact(w.grad, torch.full_like(w, 2 * 1024))


@pytest.mark.parametrize("strategy", ["auto", "fused", "pipelined"])
@on_cpu_ranks(2, device="cuda", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_two_micro_batches_in_flight(rank, strategy):
    """One's forward and the other's backward in turn, on two streams of one group, beside an
    all-to-all on a third. Gathered rows are kept for the weight's gradient, as if it came later.
    """
    group, tokens = dist.group.WORLD, dist.new_group([0, 1])
    streams, other = [torch.cuda.Stream() for _ in range(2)], torch.cuda.Stream()
    w = torch.ones(2048, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    sent, received = (torch.ones(1 << 22, device="cuda") for _ in range(2))
    torch.cuda.synchronize()

    def forward(n):
        """Of the n-th; by powers of two they differ, and bf16 is exact."""
        kept = []
        with torch.cuda.stream(streams[n % 2]):
            if n % 7 == rank:
                be_late(0.001)
            x = torch.full_like(w, 2.0 ** (n % 4), requires_grad=True)[:1024]
            x.retain_grad()
            wgrad = lambda w, dy, x: kept.append((dy, x.clone()))  # noqa: E731
            return x, kept, column_parallel_linear(x, w, None, group=group, wgrad=wgrad)

    waiting = forward(0)
    for n in range(1, 40):
        with torch.cuda.stream(other):
            dist.all_to_all_single(received, sent, group=tokens)
        following = forward(n)
        x, kept, y = waiting
        scale = 2.0 ** ((n - 1) % 4)
        with torch.cuda.stream(streams[(n - 1) % 2]):
            y.backward(torch.full_like(y, scale))
            ((dy, gathered),) = kept
            dw = plain_wgrad(w, dy, gathered)
        _done()
        assert_exact(y, torch.full_like(y, 512 * scale), f"y of {n}")
        assert_exact(x.grad, torch.full_like(x, 2 * 2048 * scale), f"dx of {n}")
        assert_exact(dw, torch.full_like(dw, 2 * 1024 * scale**2), f"dw of {n}")
        waiting = following


@on_cpu_ranks(2, device="cuda")
def test_a_capture_on_two_streams(rank):
    """A capture that goes to another stream and back, replayed between eager calls."""
    groups = dist.group.WORLD, dist.new_group([0, 1])
    cases = _cases(PLANS["fused"])
    given = [operands(case, 2) for case in cases]
    mine = [(g.x[rank].cuda(), g.w[rank].cuda()) for g in given]
    side = torch.cuda.Stream()

    def calls() -> list[torch.Tensor]:
        y = ops.all_gather_gemm(*mine[0], groups[0], plan=cases[0].plan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = ops.gemm_reduce_scatter(*mine[1], groups[1], plan=cases[1].plan)
        again = ops.all_gather_gemm(*mine[0], groups[0], plan=cases[0].plan)
        torch.cuda.current_stream().wait_stream(side)
        return [y, z, again]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = calls()
    for number in range(50):
        for result in results:
            result.fill_(float("nan"))
        if number % 3 == rank:
            be_late(0.002)
        graph.replay()
        eager = calls() if number % 4 == 0 else []
        _done()
        for made in filter(None, (results, eager)):
            for result, which in zip(made, (0, 1, 0), strict=True):
                assert_exact(result, given[which].expected[rank], f"replay {number}")
