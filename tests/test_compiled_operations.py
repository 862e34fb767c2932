"""The public operations under torch.compile: one graph, eager results; and what torch's own checks
say about their operators. The layers have `test_compiled_layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, FUSED, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import ops
from flux_megatron.embedding import operation as embedding
from flux_megatron.expert_parallel import ops as experts
from flux_megatron.problem import Plan
from flux_megatron.versions.torch import compiles_plans

PLAIN = {"FLUX_MEGATRON_STRATEGY": "sequential"}
WITHOUT_TRACING = ("test_schema", "test_autograd_registration", "test_faketensor")
E, K, N, TOKENS, ROWS, TABLES = 2, 6, 4, 8, 5, 2


def integers(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randint(-2, 3, shape, generator=made).float().to(DEVICE)


def rows_and_counts() -> tuple[Tensor, Tensor]:
    """Rows for experts of all ranks, as many for each."""
    R = dist.get_world_size()
    counts = torch.full((R, E), 3, dtype=torch.int32, device=DEVICE)
    return integers(3 * R * E, K), counts


def operations() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of the tensors that are differentiated, where the operation can be."""
    group = dist.group.WORLD
    R = group.size()
    x, counts = rows_and_counts()
    capacity = 3 * R * E

    def experts_mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y, _ = flux_megatron.a2a_gemm(x, w, counts, group, capacity=capacity)
        return flux_megatron.gemm_a2a(y.relu(), v, counts, group, tokens=capacity)

    fixed = bags()

    def embed(weight: Tensor) -> Tensor:
        return 2 * flux_megatron.embedding_all_to_all(weight, *fixed, group)

    return {
        "experts": (experts_mlp, [x, integers(E, N, K), integers(E, K, N)]),
        "embedding": (embed, [integers(TABLES, ROWS, 4)]),
        "gemv_ar": (
            lambda x, w: flux_megatron.gemv_all_reduce(x, w, group) + 1,
            [integers(TOKENS, K), integers(N, K)],
        ),
    }


def bags() -> tuple[Tensor, Tensor]:
    """Two indices a bag, for tables of this rank and samples of all."""
    bags = TABLES * 2 * dist.get_world_size()
    indices = torch.arange(2 * bags, device=DEVICE) % ROWS
    return indices, torch.arange(0, 2 * bags + 1, 2, device=DEVICE)


def results(call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    y = call(*leaves)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@on_device_ranks(2, environment=PLAIN)
def test_compiled_operations_do_what_eager_ones_do(rank):
    for name, (call, given) in operations().items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for made, right in zip(results(compiled, given), results(call, given), strict=True):
            assert_exact(made, right, name)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, name


@pytest.mark.xfail(
    not compiles_plans(), reason="older torch.compile takes no frozen dataclass as plan"
)
@on_device_ranks(2, environment=FUSED)
def test_operations_without_gradients_compile(rank):
    """Operations whose backward `nn.functions` has, by the strategy that is wanted or a plan."""
    group, R = dist.group.WORLD, dist.get_world_size()
    x, w, plan = integers(TOKENS * R, K), integers(N, K), Plan("pipelined", comm_rows=3)

    def all_of_them(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (
            flux_megatron.all_gather_gemm(x, w, group),
            flux_megatron.gemm_reduce_scatter(x, w, group),
            flux_megatron.gemm_reduce_scatter(x, w, group, plan=plan),
            flux_megatron.gemm_all_reduce(x, w, group),
        )

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(all_of_them, fullgraph=True, backend=backend)
        for made, right in zip(compiled(x, w), all_of_them(x, w), strict=True):
            assert_exact(made, right, backend)
    fused = {(pattern, "fused"): 4 for pattern in ("ag_gemm", "gemm_rs", "gemm_ar")}
    assert flux_megatron.report().calls == {**fused, ("gemm_rs", "pipelined"): 4}


@on_device_ranks(1)
def test_opcheck(rank):
    name = dist.group.WORLD.group_name
    check = partial(torch.library.opcheck, test_utils=WITHOUT_TRACING)
    x, w = integers(TOKENS, K), integers(N, K)
    for layout, weight in (("nt", w), ("nn", w.t().contiguous())):
        for bias in (None, integers(N)):
            check(ops._all_gather_gemm, (x, weight, bias, name, 1, layout, ""))
        check(ops._gemm_reduce_scatter, (x, weight, name, 1, layout, ""))
    given = (x.requires_grad_(), w.requires_grad_(), name)
    for layout, weight in (("nt", given), ("nn", (x, w.detach().t().contiguous(), name))):
        check(ops._gemm_all_reduce, (*weight, layout, ""))
    rows, counts = rows_and_counts()
    up, down = (integers(E, *shape).requires_grad_() for shape in ((N, K), (K, N)))
    for keep in (False, True):
        for layout, weight in (("nt", up), ("nn", down)):
            spare = len(rows) + 3
            check(experts._a2a_gemm, (rows, weight, counts, spare, name, layout, "", keep))
    y = integers(len(rows), N).requires_grad_()
    check(experts._gemm_a2a, (y, down, counts, len(rows), name, "nt", ""))
    check(experts._wgrad, (rows, y.detach(), counts))
    weight = integers(TABLES, ROWS, 4).requires_grad_()
    check(embedding._embedding_all_to_all, (weight, *bags(), [TABLES], name, "sum", "auto", True))
    dy = integers(2, TABLES, 4)
    check(embedding._backward, (dy, *bags(), ROWS, [TABLES], name, "sum", "auto"))
