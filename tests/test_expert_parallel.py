"""a2a_gemm and gemm_a2a: exact against the reference, forward and backward, for all kinds of
counts, and refused by name on every rank where rows do not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import errors
from flux_megatron.expert_parallel import call, ops, wgrad
from flux_megatron.expert_parallel.plans import ExpertProblem
from flux_megatron.kernels.expert_weights import ExpertWeights
from flux_megatron.kernels.expert_wgrad import expert_wgrad
from flux_megatron.lab import reference
from flux_megatron.problem import Plan, Tile

SMALL = Tile(16, 16, 16, num_warps=4, num_stages=2)
PLANS = {
    "sequential": Plan("sequential"),
    "fused": None,
    "small tiles": Plan("fused", 8, SMALL),
    "TMA": Plan("fused", 8, replace(SMALL, tma=True)),
}


def even(ranks: int, experts: int) -> list[Tensor]:
    return [torch.full((ranks, experts), 5, dtype=torch.int32) for _ in range(ranks)]


def uneven(ranks: int, experts: int) -> list[Tensor]:
    """Around the edges of tiles of 16 rows and copies of 8, with groups of none."""
    sizes = torch.tensor([0, 1, 7, 8, 9, 15, 16, 17, 0, 33], dtype=torch.int32)
    groups = torch.arange(ranks * ranks * experts).reshape(ranks, ranks, experts)
    return list(sizes[groups % len(sizes)])


def empty_experts(ranks: int, experts: int) -> list[Tensor]:
    """Only the last expert of each rank gets rows."""
    counts = torch.zeros(ranks, ranks, experts, dtype=torch.int32)
    counts[:, :, -1] = 6
    return list(counts)


def one_rank(ranks: int, experts: int) -> list[Tensor]:
    """All rows of all ranks go to the last rank."""
    counts = torch.zeros(ranks, ranks, experts, dtype=torch.int32)
    counts[:, -1] = 4
    return list(counts)


def idle_source(ranks: int, experts: int) -> list[Tensor]:
    """Rank 0 has no rows at all."""
    counts = torch.full((ranks, ranks, experts), 3, dtype=torch.int32)
    counts[0] = 0
    return list(counts)


def nothing(ranks: int, experts: int) -> list[Tensor]:
    return list(torch.zeros(ranks, ranks, experts, dtype=torch.int32))


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
    counts = routing(ranks, experts)
    tokens = [int(one.sum()) for one in counts]
    received = torch.stack(counts).sum((0, 2)).tolist()
    capacity = max(*tokens, *received) + spare or 1

    def integers(*shape: int) -> Tensor:
        return small_integers(shape, dtype, made, kept=0.5)

    def weights(outer: int, inner: int) -> list[Tensor]:
        shape = (outer, inner) if layout == "nt" else (inner, outer)
        return [integers(experts, *shape) for _ in range(ranks)]

    return Operands(
        counts, [integers(T, K) for T in tokens], weights(N, K), weights(K, N),
        [integers(T, K) for T in tokens], capacity,
    )  # fmt: skip


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


def calls(
    rank: int, name: str, layouts: Sequence[str], routings: Sequence, experts: int = 3
) -> dict[str, int]:
    group, plan = dist.group.WORLD, PLANS[name]
    flux_megatron.reset_report()
    results = []
    shape = (20, 24) if name in ("small tiles", "TMA") else (8, 16)
    for number, routing in enumerate(routings):
        layout = layouts[number % len(layouts)]
        dtype = torch.bfloat16 if number == 2 else torch.float32
        spare = number % 2 * 19
        given = operands(routing, group.size(), experts, *shape, dtype, layout, spare)
        counts = given.counts[rank].to(DEVICE)
        x, w, v = (leaves([one[rank].to(DEVICE)])[0] for one in (given.x, given.w, given.v))
        hidden, received = ops.a2a_gemm(
            x, w, counts, group, capacity=given.capacity, layout=layout, plan=plan
        )
        y = ops.gemm_a2a(hidden, v, counts, group, tokens=len(x), layout=layout, plan=plan)
        y.backward(given.dy[rank].to(DEVICE))
        came = torch.stack([one[rank] for one in given.counts])
        assert_exact(received, came, routing.__name__)
        what = ("hidden", "y", "dx", "dw", "dv")
        for word, got, right in zip(
            what, (hidden, y, x.grad, w.grad, v.grad), expected(given, layout), strict=True
        ):
            results.append((got, right[rank], f"{routing.__name__} {layout} {dtype} {word}"))
    for got, right, text in results:  # all of them now: later calls leave results alone
        assert_exact(got, right, text)
    return {strategy: count for (_, strategy), count in flux_megatron.report().calls.items()}


@pytest.mark.parametrize("name", PLANS)
def test_exact(name):
    for counted in on_device(calls, 2, name, ("nt", "nn"), ROUTINGS):
        chosen = {"sequential": {"sequential"}, "fused": {"hopper", "fused"}}.get(name, {"fused"})
        assert {*counted} <= chosen
        assert sum(counted.values()) == 2 * len(ROUTINGS)


@pytest.mark.parametrize("name", ["sequential", "small tiles"])
def test_four_ranks(name):
    on_device(calls, 4, name, ("nn", "nt"), (uneven, one_rank, idle_source))


def test_one_rank():
    on_device(calls, 1, "small tiles", ("nn",), (uneven, nothing))


@pytest.mark.parametrize("strategy", ["fused", "sequential"])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_any_number_of_ranks(world_size, strategy):
    routings = (uneven, idle_source, one_rank if world_size == 8 else empty_experts)
    environment = {"FLUX_MEGATRON_STRATEGY": strategy}
    for counted in on_device(
        calls, world_size, "fused", ("nt", "nn"), routings, 3 - world_size // 4,
        environment=environment,
    ):  # fmt: skip
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
    x, w, counts = given.x[rank], given.w[rank], given.counts[rank].clone()
    capacity = given.capacity
    if spoil == "capacity":
        capacity -= 1
    elif rank == 1:
        counts[0, 1] = {"too many": 2, "negative": -4, "wrapped": 2**31 - 1}.get(spoil, -4)
        if spoil == "negative, the sum right":
            counts[0, 0] += given.counts[rank].sum() - counts.sum()
    x, w, counts = x.to(DEVICE), w.to(DEVICE), counts.to(DEVICE)

    def called() -> None:
        ops.a2a_gemm(x, w, counts, group, capacity=capacity, plan=plan)
        flux_megatron.synchronize()  # on GPUs only the device knows

    for _ in range(2):  # and every call after it
        with pytest.raises(errors.CapacityExceeded) as caught:
            called()
        assert message in str(caught.value)


def wrong(rank: int, change: dict, message: str) -> None:
    made = {
        "x": torch.ones(6, 4, device=DEVICE), "w": torch.ones(3, 8, 4, device=DEVICE),
        "counts": torch.ones(2, 3, dtype=torch.int32, device=DEVICE), "capacity": 16,
    } | change  # fmt: skip
    x, w, counts = (made.pop(name).to(DEVICE) for name in ("x", "w", "counts"))
    with pytest.raises(ValueError, match=message):
        ops.a2a_gemm(x, w, counts, dist.group.WORLD, **made)


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
    counts = torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="6 rows and capacity 5 given"):
        ops.gemm_a2a(z, v, counts, dist.group.WORLD, tokens=6)
    for change, message in BAD:
        wrong(rank, change, message)


@pytest.mark.parametrize("plan", [None, Plan("sequential")], ids=["auto", "named"])
@on_device_ranks(2)
def test_disagreement_of_ranks_is_reported(rank, plan):
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(3, 8, 4, device=DEVICE)
    counts = torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch) as caught:
        ops.a2a_gemm(x, w, counts, dist.group.WORLD, capacity=16 + rank, plan=plan)
    reported = str(caught.value)
    assert "capacity 16" in reported
    assert "capacity 17" in reported


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_a_strategy_that_is_not_built_falls_back_and_is_reported(rank):
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(3, 8, 4, device=DEVICE)
    counts = torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    y, _ = ops.a2a_gemm(x, w, counts, dist.group.WORLD, capacity=7)
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


@pytest.mark.parametrize("sizes", [(0, 5, 70), (33, 0, 0)])
def test_weight_gradient_kernel(sizes):
    made = torch.Generator().manual_seed(0)
    a, b = (small_integers((sum(sizes) + 9, n), torch.float32, made).to(DEVICE) for n in (20, 70))
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    a[sum(sizes) :] = float("nan")  # rows of no expert
    right = [
        x.t() @ y for x, y in zip(*(t[: sum(sizes)].split(sizes) for t in (a, b)), strict=True)
    ]
    assert_exact(expert_wgrad(a, b, ends), torch.stack(right))


@pytest.mark.parametrize("adds", [False, True])
def test_weight_gradients_by_kernel_of_rows_of_several_ranks(adds, monkeypatch):
    """What runs on GPUs alone: each expert's rows are those of all sources together."""
    monkeypatch.setattr(wgrad, "_by_kernel", lambda a: True)
    monkeypatch.setattr(wgrad, "_library_groups", lambda a, b: False)
    made = torch.Generator().manual_seed(0)
    received = torch.tensor([[2, 0, 5], [1, 4, 0], [3, 3, 1]], dtype=torch.int32).to(DEVICE)
    a, b = (small_integers((21, n), torch.float32, made).to(DEVICE) for n in (12, 20))
    right = torch.stack([x.t() @ y for x, y in zip(a[:19].split([6, 7, 6]), b[:19].split([6, 7, 6]),
                                                   strict=True)])  # fmt: skip
    dw = torch.ones(3, 12, 20, device=DEVICE)
    if adds:
        wgrad.add_weight_gradient(ExpertWeights(dw), a, b, received)
        assert_exact(dw, 1 + right)
    else:
        assert_exact(wgrad.weight_gradient(a, b, received), right)
