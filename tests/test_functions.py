"""Linear layers under sequence parallelism: exact against the reference and its autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, assert_sums_exact, small_integers
from ranks import DEVICE, FUSED, be_late, here, on_device
from torch import Tensor

import flux_megatron
from flux_megatron import errors, reference
from flux_megatron.nn import all_reduced, functions
from flux_megatron.nn.all_reduced import local_linear
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import fused, pipelined, registry, sequential
from flux_megatron.problem import Pattern
from flux_megatron.symm.workspace import workspace
from flux_megatron.tuning import choice
from flux_megatron.wgrad import accumulate_wgrad_by_torch

STRATEGIES = ["fused", "pipelined", "sequential"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# s on each rank and b (or none), N on each rank, K on each rank: nothing is a multiple of a tile
SIZES = [((5, 3), 7, 9), ((3, 1), 18, 5), ((17,), 5, 3), ((2, 2, 2), 3, 20)]
LAYERS = ["column", "row", "local"]


@dataclass(frozen=True)
class Layer:
    """One layer on all ranks: integer operands, and the reference with its gradients in fp64."""

    kind: str
    dtype: torch.dtype
    x: list[Tensor]
    w: list[Tensor]
    bias: list[Tensor] | None
    dy: list[Tensor]
    y: list[Tensor] = field(default_factory=list)
    dx: list[Tensor] = field(default_factory=list)
    dw: list[Tensor] = field(default_factory=list)
    db: list[Tensor] = field(default_factory=list)


def layer(
    kind: str, world_size: int, dtype: torch.dtype,
    rows: tuple[int, ...], N: int, K: int, bias: bool,
) -> Layer:  # fmt: skip
    """x, w, bias, dy and the results, as lists over ranks; the same on every rank that asks."""
    generator = torch.Generator().manual_seed(N * K + len(rows))

    def shards(*shape: int) -> list[Tensor]:
        return [small_integers(shape, dtype, generator) for _ in range(world_size)]

    whole = (world_size * rows[0], *rows[1:])
    x = shards(*(whole if kind == "row" else rows), K)
    w = shards(N, K)
    b = shards(N) if bias and kind != "row" else None
    dy = shards(*(whole if kind == "column" else rows), N)
    made = Layer(kind, dtype, x, w, b, dy)
    solve(made)
    return made


def solve(made: Layer) -> None:
    """The reference and its gradients by autograd; asserts that every sum in them is exact."""
    x, w, dy = (
        [t.double().requires_grad_() for t in shards] for shards in (made.x, made.w, made.dy)
    )
    b = [t.double().requires_grad_() for t in made.bias or []]
    if made.kind == "column":
        y = reference.all_gather_gemm(x, w, bias=b or None)
        assert_layer_exact(torch.cat(made.x), torch.cat(made.w), torch.cat(made.dy, -1))
    elif made.kind == "row":
        y = reference.gemm_reduce_scatter(x, w)
        assert_layer_exact(torch.cat(made.x, -1), torch.cat(made.w, 1), torch.cat(made.dy))
    else:
        y = [reference.matmul(x[r], w[r]) + (b[r] if b else 0) for r in range(len(x))]
        for one in zip(made.x, made.w, made.dy, strict=True):
            assert_layer_exact(*one)
    torch.autograd.backward(y, [t.detach() for t in dy])
    made.y.extend(t.detach().to(made.dtype) for t in y)
    made.dx.extend(t.grad.to(made.dtype) for t in x)
    made.dw.extend(t.grad.to(made.dtype) for t in w)
    made.db.extend(t.grad.to(made.dtype) for t in b)


def assert_layer_exact(x: Tensor, w: Tensor, dy: Tensor) -> None:
    """No sum of forward or backward leaves the exact integers: y, db, dx, dw."""
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    assert_sums_exact(x, w.t(), extra=1)
    assert_sums_exact(torch.ones(1, len(dy), dtype=dy.dtype), dy)
    assert_sums_exact(dy, w)
    assert_sums_exact(dy.t(), x)


def apply(made: Layer, x: Tensor, w: Tensor, bias: Tensor | None, **options) -> Tensor:
    if made.kind == "column":
        return column_parallel_linear(x, w, bias, group=dist.group.WORLD, **options)
    if made.kind == "row":
        return row_parallel_linear(x, w, group=dist.group.WORLD, **options)
    return local_linear(x, w, bias, **options)


def mine(made: Layer, rank: int, needs: str = "xwb") -> list[Tensor | None]:
    """This rank's x, w, bias; those named in `needs` want gradients."""
    given = [made.x[rank], made.w[rank], made.bias[rank] if made.bias else None]
    return [
        None if t is None else t.clone().to(DEVICE).requires_grad_(name in needs)
        for name, t in zip("xwb", given, strict=True)
    ]


def check(made: Layer, rank: int, needs: str = "xwb", **options) -> None:
    """Forward and backward of this rank: gradients are exact where wanted, else None."""
    x, w, bias = mine(made, rank, needs)
    what = f"{made.kind} {made.dtype} {list(x.shape)} x {list(w.shape)} {needs} {options}"
    y = apply(made, x, w, bias, **options)
    assert_exact(y, made.y[rank], f"y of {what}")
    if not y.requires_grad:
        assert not needs, what
        return
    y.backward(made.dy[rank].to(DEVICE))
    for name, tensor, expected in (("x", x, made.dx), ("w", w, made.dw), ("b", bias, made.db)):
        if tensor is None:
            continue
        if name in needs:
            assert_exact(tensor.grad, expected[rank], f"d{name} of {what}")
        else:
            assert tensor.grad is None, f"d{name} of {what}"


def run_layers(rank: int, sizes: list) -> dict[tuple[str, str], int]:
    R = dist.get_world_size()
    for kind, dtype, (rows, N, K), bias in itertools.product(LAYERS, DTYPES, sizes, [True, False]):
        if bias and kind == "row":
            continue
        made = layer(kind, R, dtype, rows, N, K, bias)
        check(made, rank)
        if kind == "column":
            check(made, rank, save_gathered=True)
    return flux_megatron.report().calls


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_exact_forward_and_backward(world_size, strategy):
    sizes = {1: SIZES, 2: SIZES, 3: SIZES[:2], 4: SIZES[1:3], 8: SIZES[2:3]}[world_size]
    environment = {"FLUX_MEGATRON_STRATEGY": strategy}
    ran = strategy if world_size > 1 else "sequential"
    each = 3 * len(sizes) * 5  # forward and backward: 4 times column, once row
    for calls in on_device(run_layers, world_size, sizes, environment=environment):
        assert calls == {("ag_gemm", ran): each, ("gemm_rs", ran): each}


def epochs() -> tuple[int, int]:
    space = workspace(dist.group.WORLD, here())
    return space.channels["gather"].epoch, space.channels["scatter"].epoch


def transfers(work: Callable[[], object]) -> tuple[int, int]:
    """How many gathers and scatters `work` makes."""
    before = epochs()
    work()
    return tuple(after - b for after, b in zip(epochs(), before, strict=True))


def every_need(rank: int) -> None:
    """What needs no gradient is not gathered, not computed and not kept."""
    R = dist.get_world_size()
    sizes = ((5, 3), 7, 9)
    first = layer("column", R, torch.float32, *sizes, True)
    check(first, rank)  # the workspace exists from here on
    # gathers and scatters of forward and backward together
    expected = {
        ("column", "x"): (1, 1),
        ("column", "w"): (2, 0),
        ("column", "b"): (1, 0),
        ("column", "xb"): (1, 1),
        ("column", "xw"): (2, 1),
        ("column", ""): (1, 0),
        ("row", "x"): (1, 1),
        ("row", "w"): (1, 1),
        ("row", "xw"): (1, 1),
        ("row", ""): (0, 1),
    }
    for (kind, needs), transferred in expected.items():
        made = layer(kind, R, torch.float32, *sizes, kind == "column")
        assert transfers(lambda m=made, n=needs: check(m, rank, n)) == transferred, (kind, needs)
        x, w, bias = mine(made, rank, needs)
        y = apply(made, x, w, bias)
        kept = [t is not None for t in y.grad_fn.saved_tensors] if needs else [False, False]
        assert kept == ["w" in needs, bool(needs)], (kind, needs)
    made = layer("column", R, torch.float32, *sizes, True)
    assert transfers(lambda: check(made, rank, save_gathered=True)) == (1, 1)
    assert transfers(lambda: check(made, rank, "xb", save_gathered=True)) == (1, 1)
    for needs in ("x", "w", "b", "xb", "wb", "xwb", ""):
        assert transfers(
            lambda n=needs: check(layer("local", R, torch.float32, *sizes, True), rank, n)
        ) == (0, 0)


def test_what_needs_no_gradient_costs_nothing():
    on_device(every_need, 2, environment=FUSED)


def without_gradients(rank: int) -> None:
    """No layer makes a node of autograd, which no one would ask for anything."""
    for kind in ("column", "row"):
        made = layer(kind, dist.get_world_size(), torch.float32, (4, 3), 7, 5, bias=True)
        given = mine(made, rank)
        nodes = (functions._ColumnParallel, functions._RowParallel)
        with ExitStack() as patched, torch.no_grad():
            for node in nodes:
                patched.enter_context(mock.patch.object(node, "apply", side_effect=AssertionError))
            assert_exact(apply(made, *given), made.y[rank], kind)


def test_layers_without_gradients():
    on_device(without_gradients, 2)


def saved_by(rank: int) -> list[list[int]]:
    made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
    shapes = []
    for save_gathered in (False, True):
        y = apply(made, *mine(made, rank), save_gathered=save_gathered)
        shapes.append(list(y.grad_fn.saved_tensors[0].shape))
    return shapes


def test_save_gathered_keeps_all_rows_and_nothing_else_does():
    for own, gathered in on_device(saved_by, 2, environment=FUSED):
        assert own == [5, 3, 9], "as it was given"
        assert gathered == [30, 9]


def backward_of_a_plan(rank: int) -> None:
    """What a column layer's backward starts where its forward and its dgrad have two strategies."""
    started: list[str] = []
    for strategy in (sequential, fused, pipelined):
        for name in ("start_gather", "start_gemm_rs"):
            setattr(strategy, name, _noted(started, getattr(strategy, name)))
    for gathers, scatters in itertools.permutations(["sequential", "fused", "pipelined"], 2):
        space = workspace(dist.group.WORLD, here())
        space.decisions.clear()
        space.checked.clear()
        names = {Pattern.AG_GEMM: gathers, Pattern.GEMM_RS: scatters}
        choice.choose = lambda problem, space, names=names: (
            registry.strategy(problem, names[problem.pattern]).default_plan(problem), None
        )  # fmt: skip
        made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
        given = mine(made, rank)
        y = apply(made, *given)
        started.clear()
        y.backward(made.dy[rank].to(DEVICE))
        expected = [f"{scatters}.start_gather", f"{scatters}.start_gemm_rs"]
        assert started == expected, (gathers, scatters)
        assert_exact(given[0].grad, made.dx[rank], scatters)
        assert_exact(given[1].grad, made.dw[rank], scatters)


def _noted(started: list[str], function: Callable) -> Callable:
    def noted(*given: object) -> object:
        started.append(f"{function.__module__.rpartition('.')[2]}.{function.__name__}")
        return function(*given)

    return noted


def test_the_plan_of_dgrad_says_how_x_is_gathered_before_it():
    on_device(backward_of_a_plan, 2)


def some_rank_is_frozen(rank: int) -> None:
    """One rank's backward gathers x, the other's does not."""
    made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
    y = apply(made, *mine(made, rank, "xw" if rank else "x"))
    dist.barrier()

    def backward_and_another() -> None:
        y.backward(made.dy[rank].to(DEVICE))
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # by then the kernel's wait has run out of time
        apply(made, *mine(made, rank, ""))

    said = (  # each of its two new calls has a question to the other ranks before it
        "call 5 of rank 1 is gather beside gemm_rs" if rank else "one that this rank has not made"
    )
    with pytest.raises((errors.ProblemMismatch, errors.SignalTimeout), match=said):
        backward_and_another()


def test_a_gather_on_one_rank_only_is_reported():
    on_device(some_rank_is_frozen, 2, environment=FUSED | {"FLUX_MEGATRON_TIMEOUT_S": "2"})


def custom_wgrad(rank: int) -> None:
    """A wgrad that accumulates elsewhere sees all rows and leaves the weight without gradient."""
    R = dist.get_world_size()
    for kind, save_gathered in (
        ("column", False),
        ("column", True),
        ("row", False),
        ("local", False),
    ):
        made = layer(kind, R, torch.float32, (5, 3), 7, 9, False)
        x, w, bias = mine(made, rank)
        main_grad = torch.ones_like(w)

        def accumulate(weight: Tensor, dy: Tensor, x: Tensor, w=w, main_grad=main_grad) -> None:
            assert weight.data_ptr() == w.data_ptr()
            accumulate_wgrad_by_torch(main_grad, dy, x)

        options = {"save_gathered": True} if save_gathered else {}
        y = apply(made, x, w, bias, wgrad=accumulate, **options)
        for times in (1, 2):
            y.backward(made.dy[rank].to(DEVICE), retain_graph=True)
            assert_exact(main_grad, times * made.dw[rank] + 1, f"{kind}, {times} times")
        assert w.grad is None
        assert_exact(x.grad, 2 * made.dx[rank], kind)


def test_custom_wgrad():
    on_device(custom_wgrad, 2, environment=FUSED)


def deferred_wgrad(rank: int) -> None:
    """With a dy_buffer backward hands dy over, in order, and does nothing else for the weight."""
    R = dist.get_world_size()
    for kind in ("column", "local"):
        made = layer(kind, R, torch.float32, (5, 3), 7, 9, True)
        buffer: list[Tensor] = []
        x, w, bias = mine(made, rank)
        y = apply(made, x, w, bias, dy_buffer=buffer)
        assert buffer == []
        y.backward(made.dy[rank].to(DEVICE))
        assert_exact(buffer[0].view(made.dy[rank].shape), made.dy[rank], kind)
        assert len(buffer) == 1
        assert w.grad is None
        assert_exact(x.grad, made.dx[rank], kind)
        assert_exact(bias.grad, made.db[rank], kind)
        y = apply(made, *mine(made, rank), dy_buffer=[])
        assert y.grad_fn.saved_tensors[0] is None
        frozen = mine(made, rank, "x")
        apply(made, *frozen, dy_buffer=buffer).backward(made.dy[rank].to(DEVICE))
        assert len(buffer) == 1
    made = layer("column", R, torch.float32, (5, 3), 7, 9, False)

    def forward_and_backward() -> None:
        y = apply(made, *mine(made, rank), dy_buffer=[], save_gathered=True)
        y.backward(made.dy[rank].to(DEVICE))

    assert transfers(forward_and_backward) == (1, 1)


def test_deferred_wgrad():
    on_device(deferred_wgrad, 2, environment=FUSED)


def of_whole_tokens(rank: int, rows: int) -> tuple[dict, list[str]]:
    """Column and row layer without sequence parallelism; the calls, and fallbacks."""
    group = dist.group.WORLD
    for dtype in DTYPES:
        made = layer("local", group.size(), dtype, (rows, 4), 7, 9, True)
        x, w, bias = mine(made, rank)
        y = local_linear(x, w, bias, allreduce_group=group)
        assert_exact(y, made.y[rank])
        y.backward(made.dy[rank].to(DEVICE))
        assert_exact(x.grad, torch.stack(made.dx).sum(0))
        assert_exact(w.grad, made.dw[rank])
        assert_exact(bias.grad, made.db[rank])
        x, w, _ = mine(made, rank)
        y = all_reduced.row_linear(x, w, group=group)
        partials = [reference.matmul(*one).to(dtype) for one in zip(made.x, made.w, strict=True)]
        assert_exact(y, torch.stack(partials).sum(0))
        y.backward(made.dy[rank].to(DEVICE))  # its own on each rank: dx and dw sum nothing
        assert_exact(x.grad, made.dx[rank])
        assert_exact(w.grad, made.dw[rank])
    report = flux_megatron.report()
    return report.calls, [reason for _, reason in report.fallbacks]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "low_latency"])
def test_layers_of_whole_tokens(strategy, world_size):
    ran = strategy if world_size > 1 else "sequential"
    environment = {"FLUX_MEGATRON_STRATEGY": strategy}
    for calls, reasons in on_device(of_whole_tokens, world_size, 3, environment=environment):
        assert calls == {("gemm_ar", ran): 2 * len(DTYPES)}
        assert not reasons


def test_rows_that_ranks_cannot_share_are_all_reduced_without_overlap():
    for calls, reasons in on_device(of_whole_tokens, 3, 5, environment=FUSED):
        assert calls == {("gemm_ar", "sequential"): 2 * len(DTYPES)}
        assert reasons == ["20 rows cannot be divided over 3 ranks"]


def hides(rank: int) -> None:
    group = dist.group.WORLD
    made = layer("local", group.size(), torch.float32, (3, 4), 7, 9, False)
    x, w, _ = mine(made, rank)
    order: list[str] = []
    start = all_reduced.ops.start_gemm_ar

    def noted(*given, **options):
        order.append("start")
        reduction = start(*given, **options)
        return SimpleNamespace(finish=lambda: (order.append("finish"), reduction.finish())[1])

    def wgrad(w: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        order.append("wgrad")
        return dy.t() @ x

    all_reduced.ops.start_gemm_ar = noted
    y = local_linear(x, w, None, allreduce_group=group, wgrad=wgrad)
    y.backward(made.dy[rank].to(DEVICE))
    assert order == ["start", "wgrad", "finish"]


def test_wgrad_hides_the_all_reduce():
    on_device(hides, 2)


def strides(rank: int) -> None:
    """Inputs and gradients as Megatron makes them: transposed, expanded, sliced."""
    R = dist.get_world_size()
    for kind in LAYERS:
        made = layer(kind, R, torch.float32, (6, 4), 5, 8, False)
        x, w, _ = mine(made, rank, "w")
        swapped = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        assert not swapped.is_contiguous()
        y = apply(made, swapped, w, None)
        assert_exact(y, made.y[rank], kind)
        dy = made.dy[rank].to(DEVICE)
        y.backward(dy.transpose(0, 1).contiguous().transpose(0, 1), retain_graph=True)
        assert_exact(swapped.grad, made.dx[rank], kind)
        assert_exact(w.grad, made.dw[rank], kind)
        swapped.grad = w.grad = None
        y.sum().backward()  # dy is one element, expanded
        ones = Layer(kind, made.dtype, made.x, made.w, None, [torch.ones_like(t) for t in made.dy])
        solve(ones)
        assert_exact(swapped.grad, ones.dx[rank], kind)
        assert_exact(w.grad, ones.dw[rank], kind)


def test_inputs_and_gradients_of_any_strides():
    on_device(strides, 2, environment=FUSED)


def mlp(rank: int, late: int) -> None:
    """Column into row, twice, as in a transformer; one workspace for all, and one rank is late."""
    R = dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    x = [small_integers((4, 2, 6), torch.float64, generator) for _ in range(R)]
    weights = [
        [small_integers(shape, torch.float64, generator) for _ in range(R)]
        for shape in ((5, 6), (6, 5), (5, 6), (6, 5))
    ]
    whole = torch.cat(x).requires_grad_()
    columns = [[w.clone().requires_grad_() for w in shards] for shards in weights]
    y = whole
    for w1, w2 in (columns[:2], columns[2:]):
        hidden = [h.relu() for h in reference.all_gather_gemm([y], w1)]
        y = y + reference.gemm_all_reduce(hidden, w2)[0]
    y.sum().backward()
    mine = x[rank].float().to(DEVICE).requires_grad_()
    own = [shards[rank].float().to(DEVICE).requires_grad_() for shards in weights]
    out = mine
    for w1, w2 in (own[:2], own[2:]):
        if rank == late:
            be_late(0.05)
        hidden = column_parallel_linear(out, w1, None, group=dist.group.WORLD).relu()
        out = out + row_parallel_linear(hidden, w2, group=dist.group.WORLD)
    assert_exact(out, y.chunk(R)[rank].float(), "y")
    if rank == late:
        be_late(0.05)
    out.sum().backward()
    assert_exact(mine.grad, whole.grad.chunk(R)[rank].float(), "dx")
    for number, (w, shards) in enumerate(zip(own, columns, strict=True)):
        assert_exact(w.grad, shards[rank].grad.float(), f"dw of layer {number}")


@pytest.mark.parametrize(("world_size", "late"), [(1, 0), (2, 1), (4, 2)])
def test_layers_back_to_back(world_size, late):
    on_device(mlp, world_size, late, environment=FUSED)


def in_place(rank: int) -> None:
    """Megatron's loss changes logits in place; and a layer is one node, for the host's sake."""
    for kind, rows in itertools.product(LAYERS, [(5,), (5, 3)]):
        made = layer(kind, dist.get_world_size(), torch.float32, rows, 7, 9, kind != "row")
        given = mine(made, rank)
        y = apply(made, *given)
        (x_node, _), *_ = y.grad_fn.next_functions
        assert x_node.variable is given[0], kind
        y -= 1
        y.backward(made.dy[rank].to(DEVICE))
        assert_exact(y, made.y[rank] - 1, kind)
        assert_exact(given[0].grad, made.dx[rank], kind)


def test_results_may_be_changed_in_place():
    on_device(in_place, 2, environment=FUSED)
