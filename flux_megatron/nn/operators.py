"""The linear layers as torch custom operators, which torch.compile keeps whole, forward and
backward. Eager code calls `functions`, which cost the host less.

| operator | result |
| --- | --- |
| `column_parallel_linear`, `row_parallel_linear` | those of the same names in `functions` |
| `local_linear`, `row_linear` | those of the same names in `all_reduced` |
| `sum_over_group` | x summed over the ranks, in fp32 |

Operators take a group by its name, "" for none, and its R ranks: what torch.compile keeps on disk
is found by the arguments, and a group of another size may have the same name. They take the tensor
to which backward adds the weight's gradient, if there is one. They have one backward, which
computes what `needs` selects from dx, dw and db; it is one operator too, so no gather or scatter
that is under way crosses the border of a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import ops
from flux_megatron.nn import all_reduced, functions
from flux_megatron.nn.functions import Wgrad
from flux_megatron.ops import group_named
from flux_megatron.wgrad import IntoMainGrad, plain_wgrad


@torch.library.custom_op("flux_megatron::column_parallel_linear", mutates_args=())
def column_parallel_linear(
    x: Tensor, w: Tensor, main_grad: Tensor | None, group: str, R: int, bias: Tensor | None,
    save_gathered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and the gathered rows of x for backward, none without `save_gathered`."""
    kept = [x.new_empty(0, x.shape[-1])]
    with ops.phase("fprop"):
        y = ops.run_ag_gemm(
            functions._rows(x), w, bias, group_named(group),
            consume=(lambda rows: kept.append(rows.clone())) if save_gathered else None,
        )  # fmt: skip
    return functions._like(y, x, x.shape[0] * R), kept[-1]


@column_parallel_linear.register_fake
def _(x, w, main_grad, group, R, bias, save_gathered):
    tokens = x.shape[0] * R
    y = x.new_empty(tokens, *x.shape[1:-1], w.shape[0])
    rows = tokens * math.prod(x.shape[1:-1]) if save_gathered else 0
    return y, x.new_empty(rows, x.shape[-1])


@torch.library.custom_op("flux_megatron::row_parallel_linear", mutates_args=())
def row_parallel_linear(
    x: Tensor, w: Tensor, main_grad: Tensor | None, group: str, R: int
) -> Tensor:
    ranks = group_named(group)
    functions.check_tokens(x, ranks)
    with ops.phase("fprop"):
        y = ops.run_gemm_rs(functions._rows(x), w, ranks)
    return functions._like(y, x, x.shape[0] // R)


@row_parallel_linear.register_fake
def _(x, w, main_grad, group, R):
    return x.new_empty(x.shape[0] // R, *x.shape[1:-1], w.shape[0])


@torch.library.custom_op("flux_megatron::local_linear", mutates_args=())
def local_linear(
    x: Tensor, w: Tensor, main_grad: Tensor | None, group: str, R: int, bias: Tensor | None
) -> Tensor:
    with ops.phase("fprop"):
        y = functions._rows(x) @ w.t()
        y = y if bias is None else y + bias
    return functions._like(y, x, x.shape[0])


@torch.library.custom_op("flux_megatron::row_linear", mutates_args=())
def row_linear(x: Tensor, w: Tensor, main_grad: Tensor | None, group: str, R: int) -> Tensor:
    with ops.phase("fprop"):
        y = ops.run_gemm_ar(functions._rows(x), w, group_named(group))
    return functions._like(y, x, x.shape[0])


@local_linear.register_fake
@row_linear.register_fake
def _(x, w, main_grad, group, R, bias=None):
    return x.new_empty(*x.shape[:-1], w.shape[0])


@torch.library.custom_op("flux_megatron::linear_backward", mutates_args=())
def _backward(
    layer: str, dy: Tensor, x: Tensor, w: Tensor, group: str, R: int, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _gradients(layer, dy, x, w, group, R, needs, plain_wgrad)
    return _or_empty(dx, dy), _or_empty(dw, dy), _or_empty(db, dy)


@_backward.register_fake
def _(layer, dy, x, w, group, R, needs):
    shapes = (_shape_of_dx(layer, dy, w, R), w.shape, w.shape[:1])
    return tuple(dy.new_empty(shape if n else 0) for shape, n in zip(shapes, needs, strict=True))


@torch.library.custom_op("flux_megatron::linear_backward_into", mutates_args=("main_grad",))
def _backward_into(
    main_grad: Tensor, layer: str, dy: Tensor, x: Tensor, w: Tensor, group: str, R: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with the weight's gradient added to main_grad, for dx and db."""
    dx, _, db = _gradients(layer, dy, x, w, group, R, needs, IntoMainGrad(main_grad))
    return _or_empty(dx, dy), _or_empty(db, dy)


@_backward_into.register_fake
def _(main_grad, layer, dy, x, w, group, R, needs):
    needs_dx, _, needs_db = needs
    dx = dy.new_empty(_shape_of_dx(layer, dy, w, R) if needs_dx else 0)
    return dx, dy.new_empty(w.shape[0] if needs_db else 0)


def _gradients(
    layer: str,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    group: str,
    R: int,
    needs: Sequence[bool],
    wgrad: Wgrad,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db, each None where it is not needed or is added elsewhere."""
    rows = functions._rows(x) if needs[1] else None
    shape = _shape_of_dx(layer, dy, w, R)
    ranks = group_named(group) if group else None
    if layer == "local":
        options = all_reduced._Options(None, ranks, wgrad)
        return all_reduced.local_backward(dy, rows, w, shape, options, needs)
    assert ranks is not None, f"{layer}: no group"
    settings = functions._Options(ranks, wgrad, save_gathered=layer == "gathered")
    if layer == "row":
        return *functions.row_backward(dy, rows, w, shape, settings, needs[0]), None
    return functions.column_backward(dy, rows, w, shape, settings, needs)


def _shape_of_dx(layer: str, dy: Tensor, w: Tensor, R: int) -> list[int]:
    tokens = dy.shape[0]
    if layer in ("column", "gathered"):
        tokens = tokens // R
    elif layer == "row":
        tokens = tokens * R
    return [tokens, *dy.shape[1:-1], w.shape[1]]


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns tensors: an empty one for a gradient that is not needed."""
    return like.new_empty(0) if gradient is None else gradient


def _register(operator: Any, layer: str, reduces: bool = True) -> None:
    """Give the operator of a layer its backward, with communication if that `reduces`.

    Its arguments are x, w, main_grad, group, R, and maybe bias and `save_gathered`.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, main_grad, group, ctx.R, *more = inputs
        ctx.layer, ctx.group, ctx.count = layer, group if reduces else "", len(inputs)
        if layer == "column":
            ctx.mark_non_differentiable(output[1])
            if more[1]:
                ctx.layer, x = "gathered", output[1]
        ctx.save_for_backward(x, w)
        ctx.main_grad = main_grad  # not saved: other microbatches add to it before backward

    def gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        needs = [wanted[0], wanted[1], ctx.count > 5 and wanted[5]]
        given = (ctx.layer, dy, x, w, ctx.group, ctx.R, needs)
        if ctx.main_grad is None or not needs[1]:
            dx, dw, db = _backward(*given)
        else:
            (dx, db), dw = _backward_into(ctx.main_grad, *given), None
            needs[1] = False
        made = [one if need else None for one, need in zip((dx, dw, db), needs, strict=True)]
        return made[0], made[1], None, None, None, *[made[2], None][: ctx.count - 5]

    operator.register_autograd(gradients, setup_context=keep)


_register(column_parallel_linear, "column")
_register(row_parallel_linear, "row")
_register(local_linear, "local")
_register(row_linear, "local", reduces=False)


@torch.library.custom_op("flux_megatron::sum_over_group", mutates_args=())
def sum_over_group(x: Tensor, group: str) -> Tensor:
    """The sum of x over all ranks, on each of them; fp32 inside, fp64 for fp64."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    dist.all_reduce(total, group=group_named(group))
    return total.to(x.dtype)


@sum_over_group.register_fake
def _(x, group):
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[1]


def _of_the_sum(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """Every rank has the sum, and its gradient."""
    return ops.differentiable.copy(gradient, group_named(ctx.group)), None


sum_over_group.register_autograd(_of_the_sum, setup_context=_keep_group)
