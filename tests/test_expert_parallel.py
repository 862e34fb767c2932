"""a2a_gemm and gemm_a2a: exact against the reference, forward and backward, for all kinds of
counts, and refused by name on every rank where rows do not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import errors
from flux_megatron.expert_parallel import call, ops, separate, wgrad
from flux_megatron.expert_parallel.call import ExpertProblem
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.experts.wgrad import expert_wgrad
from flux_megatron.lab import reference
from flux_megatron.problem import Plan, Tile

DTYPES = [torch.float32, torch.bfloat16]
SMALL = Tile(16, 16, 16, num_warps=4, num_stages=2)
PLANS = {
    "sequential": Plan("sequential"),
    "fused": None,
    "small tiles": Plan("fused", 8, SMALL),
    "TMA": Plan("fused", 8, replace(SMALL, tma=True)),
}


def filled(ranks: int, experts: int, rows: int, where: object, others: int = 0) -> list[Tensor]:
    """Counts of all ranks: `others`, but at [source, rank, expert] = `where` there are `rows`."""
    counts = torch.full((ranks, ranks, experts), others, dtype=torch.int32)
    counts[where] = rows
    return list(counts)


def uneven(ranks: int, experts: int) -> list[Tensor]:
    """Around the edges of tiles of 16 rows and copies of 8, with groups of none."""
    sizes = torch.tensor([0, 1, 7, 8, 9, 15, 16, 17, 0, 33], dtype=torch.int32)
    groups = torch.arange(ranks * ranks * experts).reshape(ranks, ranks, experts)
    return list(sizes[groups % len(sizes)])


even = partial(filled, rows=5, where=...)
nothing = partial(filled, rows=0, where=...)
empty_experts = partial(filled, rows=6, where=(..., -1))  # but the last one of each rank
one_rank = partial(filled, rows=4, where=(slice(None), -1))  # the last, for all rows of all ranks
idle_source = partial(filled, rows=0, where=0, others=3)  # rank 0 has no rows at all
ROUTINGS = (even, uneven, empty_experts, one_rank, idle_source, nothing)


@dataclass
class Operands:
    """Of all ranks, and what all must get. `dy` is what backward begins with."""

    counts: list[Tensor]
    x: list[Tensor]
    w: list[Tensor]
    v: list[Tensor]  # of the second GEMM
    dy: list[Tensor]
    capacity: int


def operands(
    routing, ranks: int, experts: int, N: int, K: int, dtype: torch.dtype, layout: str, spare: int
) -> Operands:
    made = torch.Generator().manual_seed(N)
    integers = partial(small_integers, dtype=dtype, generator=made, kept=0.5)
    counts = routing(ranks, experts)
    tokens = [int(one.sum()) for one in counts]
    received = torch.stack(counts).sum((0, 2)).tolist()
    x = [integers((T, K)) for T in tokens]
    shapes = ((N, K), (K, N)) if layout == "nt" else ((K, N), (N, K))
    w, v = ([integers((experts, *shape)) for _ in range(ranks)] for shape in shapes)
    dy = [integers((T, K)) for T in tokens]
    return Operands(counts, x, w, v, dy, max(*tokens, *received) + spare or 1)


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.clone().requires_grad_() for one in tensors]


def expected(given: Operands, layout: str) -> Iterator[tuple[list[Tensor], ...]]:
    """y of a2a_gemm, y of gemm_a2a behind it, and the gradients of x and both weights, by autograd
    of the reference in fp64: operands are small enough that all dtypes give the same.
    """
    x, w, v = (leaves([one.double() for one in t]) for t in (given.x, given.w, given.v))
    hidden, _ = reference.a2a_gemm(x, w, given.counts, given.capacity, layout)
    y = reference.gemm_a2a(hidden, v, given.counts, layout)
    torch.autograd.backward(y, [one.double() for one in given.dy])
    dtype = given.x[0].dtype
    for tensors in (hidden, y, *([one.grad for one in t] for t in (x, w, v))):
        yield [one.detach().to(dtype) for one in tensors]


def passes(
    rank: int, given: Operands, w: Tensor, v: Tensor, module: ModuleType = ops, **options
) -> tuple[Tensor, ...]:
    """Both operations on this rank's rows and their backward: hidden, y, dx, and what came."""
    group, counts = dist.group.WORLD, given.counts[rank].to(DEVICE)
    (x,) = leaves([given.x[rank].to(DEVICE)])
    hidden, received = module.a2a_gemm(x, w, counts, group, capacity=given.capacity, **options)
    y = module.gemm_a2a(hidden, v, counts, group, tokens=len(x), **options)
    y.backward(given.dy[rank].to(DEVICE))
    return hidden, y, x.grad, received


def calls(
    rank: int, plan: Plan | None, layouts: Sequence[str], routings: Sequence, experts: int = 3
) -> dict[str, int]:
    """How many calls each strategy has run."""
    group = dist.group.WORLD
    flux_megatron.reset_report()
    results = []
    shape = (8, 16) if plan in (None, PLANS["sequential"]) else (20, 24)
    for number, routing in enumerate(routings):
        layout, dtype = layouts[number % len(layouts)], DTYPES[number == 2]
        spare = number % 2 * 19
        given = operands(routing, group.size(), experts, *shape, dtype, layout, spare)
        w, v = leaves([one[rank].to(DEVICE) for one in (given.w, given.v)])
        hidden, y, dx, received = passes(rank, given, w, v, layout=layout, plan=plan)
        assert_exact(received, torch.stack([one[rank] for one in given.counts]), str(routing))
        got = {"hidden": hidden, "y": y, "dx": dx, "dw": w.grad, "dv": v.grad}
        for right, (word, one) in zip(expected(given, layout), got.items(), strict=True):
            results.append((one, right[rank], f"{routing} {layout} {dtype} {word}"))
    for got, right, text in results:  # all of them now: later calls leave results alone
        assert_exact(got, right, text)
    return {strategy: count for (_, strategy), count in flux_megatron.report().calls.items()}


@pytest.mark.parametrize("name", PLANS)
def test_exact(name):
    for counted in on_device(calls, 2, PLANS[name], ("nt", "nn"), ROUTINGS):
        chosen = {"sequential": {"sequential"}, "fused": {"hopper", "fused"}}.get(name, {"fused"})
        assert {*counted} <= chosen
        assert sum(counted.values()) == 2 * len(ROUTINGS)


def test_one_rank():
    on_device(calls, 1, PLANS["small tiles"], ("nn",), (uneven, nothing))


@pytest.mark.parametrize("strategy", ["fused", "sequential"])
@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_any_number_of_ranks(world_size, strategy):
    routings = (uneven, idle_source, one_rank if world_size == 8 else empty_experts)
    given = None, ("nt", "nn"), routings, 3 - world_size // 8 * 2
    environment = {"FLUX_MEGATRON_STRATEGY": strategy}
    for counted in on_device(calls, world_size, *given, environment=environment):
        assert counted == {strategy: 2 * len(routings)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("capacity", "rank 1 receives 24 rows, capacity for at most 23 given"),
        ("too many", "the counts of rank 1 name 14 rows, 12 expected"),
        ("negative", "the counts of rank 1 name 8 rows, 12 expected"),
        ("wrapped", "the counts of rank 1 name 21474836"),
        ("negative, the sum right", "name 12 rows, and a negative number among them"),
    ],
)
@pytest.mark.parametrize("name", ["fused", "sequential"])
@on_device_ranks(2, fresh=True)
def test_rows_that_do_not_fit_are_refused_by_all_ranks(rank, name, spoil, message):
    group, plan = dist.group.WORLD, PLANS[name]
    given = operands(one_rank, 2, 3, 8, 16, torch.float32, "nt", spare=0)
    counts, capacity = given.counts[rank].clone(), given.capacity
    if spoil == "capacity":
        capacity -= 1
    elif rank == 1:
        counts[0, 1] = {"too many": 2, "wrapped": 2**31 - 1}.get(spoil, -4)
        if spoil == "negative, the sum right":
            counts[0, 0] += given.counts[rank].sum() - counts.sum()
    x, w, counts = (one.to(DEVICE) for one in (given.x[rank], given.w[rank], counts))

    def called() -> None:
        ops.a2a_gemm(x, w, counts, group, capacity=capacity, plan=plan)
        flux_megatron.synchronize()  # on GPUs only the device knows

    for _ in range(2):  # and every call after it
        with pytest.raises(errors.CapacityExceeded, match=message):
            called()


def ones() -> dict[str, Tensor]:
    """Six rows for three experts of two ranks."""
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(3, 8, 4, device=DEVICE)
    return {"x": x, "w": w, "counts": torch.ones(2, 3, dtype=torch.int32, device=DEVICE)}


BAD = [
    ({"counts": torch.ones(2, 3, dtype=torch.int64)}, r"\[2, 3\] int64 given, \[2, 3\] int32"),
    ({"counts": torch.ones(3, 3, dtype=torch.int32)}, r"\[3, 3\] int32 given, \[2, 3\] int32"),
    ({"capacity": 5}, "6 rows and capacity 5 given"),
    ({"layout": "nn"}, "equal K expected for layout 'nn'"),
    ({"w": torch.ones(8, 4)}, "one for each expert expected"),
    ({"plan": Plan("pipelined")}, "strategy 'pipelined' given"),
]


@on_device_ranks(2)
def test_wrong_arguments_are_refused(rank):
    z, v = torch.ones(5, 8, device=DEVICE), torch.ones(3, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="6 rows and capacity 5 given"):
        ops.gemm_a2a(z, v, ones()["counts"], dist.group.WORLD, tokens=6)
    for change, message in BAD:
        made = ones() | {"capacity": 16} | change
        tensors = [made.pop(name).to(DEVICE) for name in ("x", "w", "counts")]
        with pytest.raises(ValueError, match=message):
            ops.a2a_gemm(*tensors, dist.group.WORLD, **made)


@pytest.mark.parametrize("plan", [None, Plan("sequential")], ids=["auto", "named"])
@on_device_ranks(2)
def test_disagreement_of_ranks_is_reported(rank, plan):
    with pytest.raises(errors.ProblemMismatch, match=r"capacity 16.*capacity 17"):
        ops.a2a_gemm(*ones().values(), dist.group.WORLD, capacity=16 + rank, plan=plan)


@pytest.mark.parametrize("separated", [False, True])
@on_device_ranks(2)
def test_what_no_gradient_needs_may_change_before_backward(rank, separated):
    """Without gradients of weights the rows, without one of x the first weights."""
    given = operands(uneven, 2, 3, 8, 16, torch.float32, "nt", 0)
    group, counts = dist.group.WORLD, given.counts[rank].to(DEVICE)
    *_, dx, dw, dv = (one[rank] for one in expected(given, "nt"))

    module = separate if separated else ops

    def parameters(whole: Tensor) -> Tensor | list[Tensor]:
        return [*whole.unbind(0)] if separated else whole

    for frozen in ("x", "weights"):
        x, w, v = leaves([one[rank].to(DEVICE) for one in (given.x, given.w, given.v)])
        for one in (x,) if frozen == "x" else (w, v):
            one.requires_grad_(False)
        hidden, _ = module.a2a_gemm(x, parameters(w), counts, group, capacity=given.capacity)
        y = module.gemm_a2a(hidden, parameters(v), counts, group, tokens=len(x))
        with torch.no_grad():
            for one in (w,) if frozen == "x" else (x, hidden):
                one.mul_(2)
        y.backward(given.dy[rank].to(DEVICE))
        found, right = ((w.grad, v.grad), (dw, dv)) if frozen == "x" else ((x.grad,), (dx,))
        for gradient, wanted in zip(found, right, strict=True):
            assert_exact(gradient, wanted, frozen)


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_a_strategy_that_is_not_built_falls_back_and_is_reported(rank):
    y, _ = ops.a2a_gemm(*ones().values(), dist.group.WORLD, capacity=7)
    assert_exact(y, torch.cat([torch.full((6, 8), 4.0), torch.zeros(1, 8)]))
    reasons = [reason for _, reason in flux_megatron.report().fallbacks]
    assert reasons == ["pipelined is not built for a2a_gemm"]


@pytest.mark.parametrize("on_hopper", [True, False])
def test_a_hopper_gpu_that_runs_portable_kernels_says_why(on_hopper):
    refused = {"hopper": "K 12 is odd", "fused": None, "signalled": None}
    problem = ExpertProblem("a2a_gemm", 6, 3, 8, 4, "float32", 2)
    with (
        mock.patch.object(call, "_refusal", lambda problem, name, *_: refused[name]),
        mock.patch.object(call, "_on_hopper", return_value=on_hopper),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        decision = call._choose(problem, torch.ones(6, 4), None, mock.Mock())
    assert (decision.plan.strategy, decision.fallback) == ("fused", None)
    whys = ["flux_megatron: a2a_gemm runs the portable kernels: K 12 is odd"]
    assert [str(one.message) for one in said] == whys * on_hopper


def gradients(a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """Of each expert's weight, from as many rows as it has in `sizes`, one after the other."""
    pieces = (t[: sum(sizes)].float().split(sizes) for t in (a, b))
    return torch.stack([x.t() @ y for x, y in zip(*pieces, strict=True)])


@pytest.mark.parametrize("sizes", [(0, 5, 70), (33, 0, 0)])
def test_weight_gradient_kernel(sizes):
    made = torch.Generator().manual_seed(0)
    a, b = (small_integers((sum(sizes) + 9, n), torch.float32, made).to(DEVICE) for n in (20, 70))
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    a[sum(sizes) :] = float("nan")  # rows of no expert
    assert_exact(expert_wgrad(a, b, ends), gradients(a, b, sizes))


@pytest.mark.parametrize("adds", [False, True])
def test_weight_gradients_by_kernel_of_rows_of_several_ranks(adds, monkeypatch):
    """What runs on GPUs alone: each expert's rows are those of all sources together."""
    monkeypatch.setattr(wgrad, "_by_kernel", lambda a: True)
    monkeypatch.setattr(wgrad, "_library_groups", lambda a, b: False)
    made = torch.Generator().manual_seed(0)
    received = torch.tensor([[2, 0, 5], [1, 4, 0], [3, 3, 1]], dtype=torch.int32).to(DEVICE)
    a, b = (small_integers((21, n), torch.float32, made).to(DEVICE) for n in (12, 20))
    right, dw = gradients(a, b, (6, 7, 6)), torch.ones(3, 12, 20, device=DEVICE)
    if adds:
        wgrad.add_weight_gradient(ExpertWeights(dw), a, b, received)
        assert_exact(dw, 1 + right)
    else:
        assert_exact(wgrad.weight_gradient(a, b, received), right)
