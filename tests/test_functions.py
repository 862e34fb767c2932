"""Linear layers under sequence parallelism: exact against the reference and its autograd."""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from layer_cases import Layer, apply, check, layer, mine, solve, transfers
from ranks import DEVICE, FUSED, on_device_ranks

import flux_megatron
from flux_megatron.nn import linear_passes
from flux_megatron.nn.functions import (
    column_parallel_linear,
    local_linear,
    row_linear,
    row_parallel_linear,
)

STRATEGIES = ["fused", "pipelined", "sequential"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# s on each rank and b (or none), N on each rank, K on each rank: nothing is a multiple of a tile
SIZES = [((5, 3), 7, 9), ((3, 1), 18, 5), ((17,), 5, 3), ((2, 2, 2), 3, 20)]
LAYERS = ["column", "row", "local"]


MORE = [(1, "auto"), (3, "fused"), (4, "pipelined"), (8, "fused")]


@pytest.mark.parametrize(("world_size", "strategy"), [*itertools.product([2], STRATEGIES), *MORE])
@on_device_ranks("world_size", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_exact_forward_and_backward(rank, strategy):
    R = dist.get_world_size()
    sizes = {1: SIZES, 2: SIZES, 3: SIZES[:2], 4: SIZES[1:3], 8: SIZES[2:3]}[R]
    for kind, dtype, (rows, N, K), bias in itertools.product(LAYERS, DTYPES, sizes, [True, False]):
        if bias and kind == "row":
            continue
        made = layer(kind, R, dtype, rows, N, K, bias)
        check(made, rank)
        if kind == "column":
            check(made, rank, save_gathered=True)
    ran = strategy if R > 1 else "sequential"
    each = 3 * len(sizes) * 5  # forward and backward: 4 times column, once row
    assert flux_megatron.report().calls == {("ag_gemm", ran): each, ("gemm_rs", ran): each}


@on_device_ranks(2, environment=FUSED)
def test_what_needs_no_gradient_costs_nothing(rank):
    R = dist.get_world_size()
    sizes = ((5, 3), 7, 9)
    first = layer("column", R, torch.float32, *sizes, True)
    check(first, rank)  # the workspace exists from here on
    # gathers and scatters of forward and backward together
    expected = {
        ("column", "x"): (1, 1), ("column", "w"): (2, 0), ("column", "b"): (1, 0),
        ("column", "xb"): (1, 1), ("column", "xw"): (2, 1), ("column", ""): (1, 0),
        ("row", "x"): (1, 1), ("row", "w"): (1, 1), ("row", "xw"): (1, 1), ("row", ""): (0, 1),
        **{("local", needs): (0, 0) for needs in ("x", "w", "b", "xb", "wb", "xwb", "")},
    }  # fmt: skip
    for (kind, needs), transferred in expected.items():
        made = layer(kind, R, torch.float32, *sizes, kind != "row")
        assert transfers(lambda m=made, n=needs: check(m, rank, n)) == transferred, (kind, needs)
        x, w, bias = mine(made, rank, needs)
        y = apply(made, x, w, bias)
        kept = [t is not None for t in y.grad_fn.saved_tensors] if needs else [False, False]
        assert kept == ["w" in needs, "x" in needs], (kind, needs)
    made = layer("column", R, torch.float32, *sizes, True)
    assert transfers(lambda: check(made, rank, save_gathered=True)) == (1, 1)
    assert transfers(lambda: check(made, rank, "xb", save_gathered=True)) == (1, 1)


@on_device_ranks(2)
def test_layers_without_gradients(rank):
    """No layer makes a node of autograd, which no one would ask for anything."""
    for kind in ("column", "row"):
        made = layer(kind, dist.get_world_size(), torch.float32, (4, 3), 7, 5, bias=True)
        given = mine(made, rank)
        node = mock.patch.object(linear_passes.LinearNode, "apply", side_effect=AssertionError)
        with node, torch.no_grad():
            assert_exact(apply(made, *given), made.y[rank], kind)


@on_device_ranks(2, environment=FUSED)
def test_save_gathered_keeps_all_rows_and_nothing_else_does(rank):
    made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
    shapes = []
    for save_gathered in (False, True):
        y = apply(made, *mine(made, rank), save_gathered=save_gathered)
        shapes.append(list(y.grad_fn.saved_tensors[0].shape))
    assert shapes == [[5, 3, 9], [30, 9]]  # the first as it was given


@on_device_ranks(2, environment=FUSED)
def test_inputs_and_gradients_of_any_strides(rank):
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


@on_device_ranks(2, environment=FUSED)
def test_results_may_be_changed_in_place(rank):
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


def of_each_layer(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    group = dist.group.WORLD
    return {
        "torch": torch.nn.functional.linear(x, w),
        "local": local_linear(x, w, None),
        "summed": local_linear(x, w, None, allreduce_group=group),
        "column": column_parallel_linear(x, w, None, group=group),
        "row": row_parallel_linear(x, w, group=group),
        "whole": row_linear(x, w, group=group),
    }


@on_device_ranks(2, environment=FUSED)
def test_under_autocast_layers_have_the_dtypes_of_torch_s(rank):
    x = torch.ones(8, 16, device=DEVICE, requires_grad=True)
    w = torch.ones(12, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        made = of_each_layer(x, w)
    for name, y in made.items():
        dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, x.dtype, w.dtype), name
        assert_exact(y, torch.full_like(y, 32 if name in ("row", "whole") else 16), name)
    with torch.autocast(DEVICE, torch.bfloat16):
        made = of_each_layer(x.double(), w.double())
    assert {y.dtype for y in made.values()} == {torch.float64}


@on_device_ranks(2, environment=FUSED)
def test_what_no_gradient_needs_may_change_before_backward(rank):
    for frozen in ("x", "w"):
        x = torch.ones(8, 16, device=DEVICE, requires_grad=frozen == "w")
        w = torch.ones(12, 16, device=DEVICE, requires_grad=frozen == "x")
        made = of_each_layer(x, w)
        with torch.no_grad():
            (w if frozen == "x" else x).mul_(2)
        for y in made.values():
            y.sum().backward()


@on_device_ranks(2, environment=FUSED)
def test_a_vector_is_one_row_of_layers_that_have_every_token(rank):
    group = dist.group.WORLD
    x = torch.arange(4.0, device=DEVICE).requires_grad_()
    w = torch.ones(3, 4, device=DEVICE, requires_grad=True)
    for one, R in ((partial(local_linear, bias=None), 1), (partial(row_linear, group=group), 2)):
        for run in (one, torch.compile(one, backend="aot_eager", fullgraph=True)):
            y = run(x, w)
            assert_exact(y, R * (w @ x))
            dx, dw = torch.autograd.grad(y.sum(), (x, w))
            assert_exact(dx, torch.full_like(x, 3))
            assert_exact(dw, x.expand(3, 4))
    said = r"_parallel_linear: x \[4\] given, \[tokens, ..., features\] expected"
    with pytest.raises(ValueError, match="column" + said):
        column_parallel_linear(x, w, None, group=group)
    with pytest.raises(ValueError, match="row" + said):
        torch.compile(partial(row_parallel_linear, group=group), backend="eager")(x, w)
