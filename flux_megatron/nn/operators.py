"""The linear layers as torch custom operators, which torch.compile keeps whole, forward and
backward. Eager code calls `functions`, which cost the host less; the names of layers are theirs.

Operators take a group by its name, "" for none, and its R ranks: what torch.compile keeps on disk
is found by the arguments, and a group of another size may have the same name. They take the tensor
to which backward adds the weight's gradient, if there is one. They have one backward, which
computes what `needs` selects from dx, dw and db; it is one operator too, so no gather or scatter
that is under way crosses the border of a compiled graph. `sum_over_group` sums x over the ranks, in
fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flux_megatron import ops
from flux_megatron.nn import linear_passes
from flux_megatron.nn.linear_passes import Wgrad
from flux_megatron.wgrad import IntoMainGrad, plain_wgrad


@torch.library.custom_op("flux_megatron::linear", mutates_args=())
def linear(
    layer: str, x: Tensor, w: Tensor, main_grad: Tensor | None, group: str, R: int,
    bias: Tensor | None, save_gathered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and the gathered rows of x for backward, none without `save_gathered`."""
    ranks = ops.group_named(group) if group else None
    y, kept = linear_passes.forward(layer, x, w, bias, ranks, save_gathered)
    return y, x.new_empty(0, x.shape[-1]) if kept is None else kept


@linear.register_fake
def _(layer, x, w, main_grad, group, R, bias, save_gathered):
    y = x.new_empty(*_leading(layer, x, R, "column", "row"), w.shape[0])
    rows = math.prod(y.shape[:-1]) if save_gathered else 0
    return y, x.new_empty(rows, x.shape[-1])


def _leading(layer: str, given: Tensor, R: int, gathers: str, scatters: str) -> list[int]:
    """All sizes but the last of what these layers make of `given`; none of a single row's."""
    sizes = [*given.shape[:-1]]
    if layer in (gathers, scatters):
        sizes[:1] = [n * R if layer == gathers else n // R for n in sizes[:1]]
    return sizes


@torch.library.custom_op("flux_megatron::linear_backward", mutates_args=("main_grad",))
def _backward(
    main_grad: Tensor | None, layer: str, dy: Tensor, x: Tensor, w: Tensor, group: str, R: int,
    save_gathered: bool, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw, db, each empty where it is not needed, or is added to main_grad; x and w are empty
    where nothing reads them.
    """
    wgrad: Wgrad = plain_wgrad if main_grad is None else IntoMainGrad(main_grad)
    rows = linear_passes.rows_of(x) if needs[1] else None
    ranks = ops.group_named(group) if group else None
    options = linear_passes.Options(layer, ranks, wgrad, save_gathered)
    shape = _shape_of_dx(layer, dy, w, R) if needs[0] else ()
    dx, dw, db = linear_passes.backward(dy, rows, w, shape, options, needs)
    return _or_empty(dx, dy), _or_empty(dw, dy), _or_empty(db, dy)


@_backward.register_fake
def _(main_grad, layer, dy, x, w, group, R, save_gathered, needs):
    of_dx = _shape_of_dx(layer, dy, w, R) if needs[0] else ()
    shapes = (of_dx, (dy.shape[-1], x.shape[-1]), dy.shape[-1:])
    made = (needs[0], needs[1] and main_grad is None, needs[2])
    return tuple(dy.new_empty(shape if one else 0) for shape, one in zip(shapes, made, strict=True))


def _shape_of_dx(layer: str, dy: Tensor, w: Tensor, R: int) -> list[int]:
    return [*_leading(layer, dy, R, "row", "column"), w.shape[1]]


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    """An operator takes and returns tensors: an empty one for what is not needed."""
    return like.new_empty(0) if gradient is None else gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.layer, x, w, main_grad, ctx.group, ctx.R, _, ctx.save_gathered = inputs
    ctx.mark_non_differentiable(output[1])
    needs_x, needs_w = ctx.needs_input_grad[1:3]
    gathers = needs_w and ctx.layer in ("column", "row")  # by a plan, which the shape of w finds
    ctx.save_for_backward(
        (output[1] if ctx.save_gathered else x) if needs_w else None,
        w if needs_x or gathers else None,
    )
    ctx.main_grad = main_grad  # not saved: other microbatches add to it before backward


def _layer_gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, w = (_or_empty(one, dy) for one in ctx.saved_tensors)
    needs = [ctx.needs_input_grad[place] for place in (1, 2, 6)]
    main_grad = ctx.main_grad if needs[1] else None
    made = _backward(main_grad, ctx.layer, dy, x, w, ctx.group, ctx.R, ctx.save_gathered, needs)
    wanted = (needs[0], needs[1] and main_grad is None, needs[2])
    dx, dw, db = (one if need else None for one, need in zip(made, wanted, strict=True))
    return None, dx, dw, None, None, None, db, None


linear.register_autograd(_layer_gradients, setup_context=_keep)


@torch.library.custom_op("flux_megatron::sum_over_group", mutates_args=())
def sum_over_group(x: Tensor, group: str) -> Tensor:
    """The sum of x over all ranks, on each of them; fp32 inside, fp64 for fp64."""
    return ops.differentiable.reduce(x, ops.group_named(group))


@sum_over_group.register_fake
def _(x, group):
    return x.new_empty(x.shape)
