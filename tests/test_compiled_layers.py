"""Compiled layers and operations: one graph, forward and backward, with exactly the eager results;
and what torch's own checks say about their operators.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, FUSED, on_device_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flux_megatron
from flux_megatron import ops
from flux_megatron.embedding import operation as embedding
from flux_megatron.expert_parallel import ops as experts
from flux_megatron.nn import functions, norm, operators
from flux_megatron.problem import Plan
from flux_megatron.versions.torch import TORCH
from flux_megatron.wgrad import IntoMainGrad

K, N, BATCH = 8, 6, 2
E, TOKENS, ROWS, TABLES = 2, 8, 5, 2
PLAIN = {"FLUX_MEGATRON_STRATEGY": "sequential"}
Layer = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> None:
    """What the first compilation imports, here and not in each fork."""
    importlib.import_module("torch._inductor.compile_fx")
    compiled(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()


def layers() -> dict[str, Layer]:
    """Each layer of (x, w, bias, wgrad), of the world; None for the bias of a row layer."""
    group = dist.group.WORLD

    def without_bias(layer: Layer) -> Layer:
        return lambda x, w, bias, wgrad=None: layer(x, w, group=group, wgrad=wgrad)

    return {
        "column": partial(functions.column_parallel_linear, group=group),
        "gathered": partial(functions.column_parallel_linear, group=group, save_gathered=True),
        "local": functions.local_linear,
        "column_ar": partial(functions.local_linear, allreduce_group=group),
        "row": without_bias(functions.row_parallel_linear),
        "row_ar": without_bias(functions.row_linear),
    }


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Of this rank, and small: every sum is exact."""
    made = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randint(-2, 3, shape, generator=made).float().to(DEVICE)


def operands(tokens: int = 4) -> list[Tensor]:
    """x, w, bias of this rank."""
    shapes = ((tokens, BATCH, K), (N, K), (N,))
    return [integers(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def passes(layer: Layer, given: list[Tensor], **options) -> list[Tensor | None]:
    """y and the gradients; dy differs from element to element."""
    for tensor in given:
        tensor.grad = None
    y = layer(*given, **options)
    y.backward((torch.arange(y.numel(), device=y.device) % 3).view(y.shape).to(y.dtype))
    return [y, *(tensor.grad for tensor in given)]


def same(made: list[Tensor | None], expected: list[Tensor | None], what: str) -> None:
    for one, right in zip(made, expected, strict=True):
        assert (one is None) == (right is None), what
        if one is not None:
            assert_exact(one, right, what)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(layer: Layer, backend: str = "aot_eager", **options) -> Layer:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(layer, fullgraph=True, backend=backend, **options)


@on_device_ranks(2, environment=FUSED)
def test_what_no_gradient_needs_may_change_before_a_compiled_backward(rank):
    """Without a gradient of w, x; without one of x, w, whose shape a column or row layer needs."""
    for kind, layer in layers().items():
        for frozen in (0, 1) if kind in ("local", "column_ar", "row_ar") else (1,):
            given = operands()
            given[frozen].requires_grad_(False)
            expected = passes(layer, given)
            for tensor in given:
                tensor.grad = None
            y = compiled(layer)(*given)
            with torch.no_grad():
                given[1 - frozen].mul_(2)
            y.backward((torch.arange(y.numel(), device=y.device) % 3).view(y.shape).to(y.dtype))
            same([y, *(tensor.grad for tensor in given)], expected, f"{kind} {frozen}")


@on_device_ranks(2, environment=FUSED)
def test_compiled_layers_do_what_eager_ones_do(rank):
    for kind, layer in layers().items():
        given = operands()
        expected = passes(layer, given)
        same(passes(compiled(layer), given), expected, kind)
        assert graphs() == 1, kind
    layer, given = layers()["column"], operands()
    given[0].requires_grad_(False)  # x has none
    same(passes(compiled(layer), given), passes(layer, given), "x without gradient")
    calls = flux_megatron.report().calls
    assert {strategy for _, strategy in calls} == {"fused"}


def mlp(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A transformer's MLP: norm, column, activation, row, residual."""
    column, row = layers()["column"], layers()["row"]
    normal = norm.rms_norm(x, torch.ones(K, device=x.device))
    return x + row(column(normal, w, bias).relu() * 2, w.t().contiguous(), None)


def operations() -> dict[str, tuple[Layer, list[Tensor]]]:
    """Functions of the tensors that are differentiated, where an operation can be."""
    group = dist.group.WORLD
    x, counts = rows_and_counts()
    fixed = bags()

    def experts_mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y, _ = flux_megatron.a2a_gemm(x, w, counts, group, capacity=len(x))
        return flux_megatron.gemm_a2a(y.relu(), v, counts, group, tokens=len(x))

    def embed(weight: Tensor) -> Tensor:
        return 2 * flux_megatron.embedding_all_to_all(weight, *fixed, group)

    def few_rows(x: Tensor, w: Tensor) -> Tensor:
        return flux_megatron.gemv_all_reduce(x, w, group) + 1

    made = {
        "experts": (experts_mlp, [x, integers(E, N, K), integers(E, K, N)]),
        "embedding": (embed, [integers(TABLES, ROWS, 4)]),
        "gemv_ar": (few_rows, [integers(TOKENS, K), integers(N, K)]),
    }
    return {n: (call, [one.requires_grad_() for one in given]) for n, (call, given) in made.items()}


def rows_and_counts() -> tuple[Tensor, Tensor]:
    """Rows for experts of all ranks, as many for each."""
    R = dist.get_world_size()
    counts = torch.full((R, E), 3, dtype=torch.int32, device=DEVICE)
    return integers(3 * R * E, K), counts


def bags() -> tuple[Tensor, Tensor]:
    """Two indices a bag, for tables of this rank and samples of all."""
    bags = TABLES * 2 * dist.get_world_size()
    indices = torch.arange(2 * bags, device=DEVICE) % ROWS
    return indices, torch.arange(0, 2 * bags + 1, 2, device=DEVICE)


@on_device_ranks(2, environment=PLAIN)
def test_compiled_operations_do_what_eager_ones_do(rank):
    for name, (call, given) in operations().items():
        same(passes(compiled(call), given), passes(call, given), name)
        assert graphs() == 1, name


@pytest.mark.xfail(
    not TORCH.since("2.13"), reason="older torch.compile takes no frozen dataclass as plan"
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
        same(compiled(all_of_them, backend)(x, w), all_of_them(x, w), backend)
    fused = {(pattern, "fused"): 4 for pattern in ("ag_gemm", "gemm_rs", "gemm_ar")}
    assert flux_megatron.report().calls == {**fused, ("gemm_rs", "pipelined"): 4}


INDUCTOR = {  # without workers, and programs that ask what the CPU can do
    "TORCHINDUCTOR_CACHE_DIR": "{tmp_path}", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    DEVICE == "cpu" and not shutil.which("g++"), reason="inductor needs a C++ compiler"
)
@on_device_ranks(1, environment=INDUCTOR, limit_s=250)
def test_inductor_compiles_a_block(rank):
    given = operands()
    expected = passes(mlp, given)
    for one, right in zip(passes(compiled(mlp, "inductor"), given), expected, strict=True):
        torch.testing.assert_close(one, right)  # inductor fuses the norm with its own rounding


@on_device_ranks(1)
def test_the_weight_s_gradient_is_added_to_main_grad(rank):
    """Two microbatches, one after the other."""
    for kind, layer in layers().items():
        sums = []
        for call in (layer, compiled(layer)):
            given = operands()
            wgrad = IntoMainGrad(torch.ones_like(given[1]))
            for _ in range(2):
                y = call(*given, wgrad=wgrad)
                y.backward(torch.ones_like(y))
            assert given[1].grad is None, kind
            sums.append([wgrad.main_grad, given[0].grad, given[2].grad])
        same(sums[1], sums[0], kind)
        assert (sums[0][0] != 1).any(), kind
        assert graphs() == 1
    first, second = (call(*given, wgrad=wgrad).sum() for _ in range(2))
    second.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()  # autograd looks after main_grad, as after all that a graph keeps


@on_device_ranks(2, environment=PLAIN)
def test_tokens_may_change_without_another_graph(rank):
    """One graph for all numbers of tokens; layers of other groups or sizes have their own."""
    for kind in ("column", "gathered", "row"):
        layer = layers()[kind]
        dynamic = compiled(layer, dynamic=True)
        for tokens in (4, 6, 16):
            given = operands(tokens)
            same(passes(dynamic, given), passes(layer, given), f"{kind}, {tokens} tokens")
        assert graphs() == 1, kind


@on_device_ranks(1)
def test_a_function_as_wgrad_is_refused_by_name(rank):
    options = {"group": dist.group.WORLD, "wgrad": lambda w, dy, x: dy.t() @ x}
    column = partial(functions.column_parallel_linear, **options)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="IntoMainGrad as wgrad expected"):
        compiled(column)(*operands())


@on_device_ranks(2, environment=FUSED)
def test_a_function_as_wgrad_breaks_the_graph_alone(rank):
    """What Dynamo would go on into has handles of symmetric memory."""
    twice = {"wgrad": lambda w, dy, x: 2 * dy.t() @ x}
    for kind, layer in layers().items():
        by_torch = torch.compile(layer, backend="aot_eager")
        same(passes(by_torch, operands(), **twice), passes(layer, operands(), **twice), kind)
        with torch.no_grad():
            assert_exact(by_torch(*operands(), **twice), layer(*operands(), **twice), kind)


@on_device_ranks(1)
def test_norms_compile_with_their_kernels(rank):
    x = torch.randn(4, BATCH, K, device=DEVICE, requires_grad=True)
    gain, shift = (torch.randn(K, device=DEVICE, requires_grad=True) for _ in range(2))
    interpreted = mock.patch.object(norm, "INTERPRET", True) if DEVICE == "cpu" else nullcontext()
    with interpreted:
        for call, given in ((norm.rms_norm, [x, gain]), (norm.layer_norm, [x, gain, shift])):
            for options in ({}, {"zero_centered": True, "eps": 1e-3}):
                expected = passes(call, given, **options)
                same(passes(compiled(call), given, **options), expected, f"{call.__name__}")
                assert graphs() == 1
    wide = torch.ones(1, 20000, device=DEVICE)
    with interpreted, pytest.warns(UserWarning, match="take more than"):
        compiled(norm.rms_norm)(wide, torch.ones(20000, device=DEVICE))
    assert flux_megatron.report().fallbacks


@on_device_ranks(1)
def test_shapes_follow_from_the_arguments_alone(rank):
    """A graph on disk is found by the arguments, so they say how large the group is."""
    name = dist.group.WORLD.group_name
    with FakeTensorMode():
        x, w = torch.empty(6, BATCH, K), torch.empty(N, K)
        y, kept = operators.linear("column", x, w, None, name, 3, None, True)
        assert (y.shape, kept.shape) == ((18, BATCH, N), (18 * BATCH, K))
        y, kept = operators.linear("row", x, w, None, name, 3, None, False)
        assert (y.shape, kept.shape) == ((2, BATCH, N), (0, K))
        assert ops._all_gather_gemm(x[:, 0], w, None, name, 3, "nt", "").shape == (18, N)
        assert ops._gemm_reduce_scatter(x[:, 0], w, name, 3, "nt", "").shape == (2, N)


CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


@on_device_ranks(1)
def test_opcheck_of_layers(rank):
    name = dist.group.WORLD.group_name
    x, w, bias = operands()
    main_grad, dy = torch.zeros_like(w), torch.ones(4, BATCH, N, device=DEVICE)
    check = partial(torch.library.opcheck, test_utils=CHEAP)
    torch.library.opcheck(operators.linear, ("column", x, w, None, name, 1, bias, False))
    for into, layer in itertools.product((None, main_grad), ("column", "row", "local", "whole")):
        of_layer = bias if layer in ("column", "local") else None
        check(operators.linear, (layer, x, w, into, name, 1, of_layer, layer == "column"))
        if layer != "whole":
            given = layer, dy, x.detach(), w.detach(), name, 1, False
            check(operators._backward, (into, *given, [True, True, layer != "row"]))
    check(operators.sum_over_group, (x.detach(), name))
    with mock.patch.object(norm, "INTERPRET", True):
        gain = torch.ones(K, device=DEVICE, requires_grad=True)
        check(norm._operator, (x, gain, bias.detach().new_zeros(K), "layer_norm", 1e-5, False))
        check(norm._operator, (x, gain, None, "rms_norm", 1e-5, True))


@on_device_ranks(1)
def test_opcheck_of_operations(rank):
    name = dist.group.WORLD.group_name
    check = partial(torch.library.opcheck, test_utils=CHEAP)
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
