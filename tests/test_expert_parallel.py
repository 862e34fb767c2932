"""a2a_gemm and gemm_a2a: exact against the reference, forward and backward, for all kinds of counts,
and refused by name on every rank where rows do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flux_megatron
from flux_megatron import errors, reference
from flux_megatron.expert_parallel import ops
from flux_megatron.kernels.expert_wgrad import expert_wgrad
from flux_megatron.problem import Plan, Tile

SMALL = Tile(16, 16, 16, num_warps=4, num_stages=2)
PLANS = {
    "sequential": Plan("sequential"),
    "fused": None,
    "small tiles": Plan("fused", 8, SMALL),
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


def calls(rank: int, name: str, layouts: Sequence[str]) -> dict[str, int]:
    group, plan = dist.group.WORLD, PLANS[name]
    flux_megatron.reset_report()
    results = []
    shape = (20, 24) if name == "small tiles" else (8, 16)
    for number, routing in enumerate(ROUTINGS):
        layout = layouts[number % len(layouts)]
        dtype = torch.bfloat16 if number == 2 else torch.float32
        given = operands(routing, group.size(), 3, *shape, dtype, layout, spare=number % 2 * 19)
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


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_exact(world_size, name):
    layouts = ("nt", "nn") if name == "small tiles" else ("nt",)
    for counted in on_device(calls, world_size, name, layouts):
        assert counted == {"sequential" if name == "sequential" else "fused": 2 * len(ROUTINGS)}


def test_one_rank():
    on_device(calls, 1, "small tiles", ("nn",))
