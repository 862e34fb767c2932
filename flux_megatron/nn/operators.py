"""The linear layers as torch custom operators, which torch.compile keeps whole, forward and
backward. Eager code calls `functions`, which cost the host less.

| operator | result |
| --- | --- |
| `column_parallel_linear` | that of `functions.column_parallel_linear` |
| `row_parallel_linear` | that of `functions.row_parallel_linear` |
| `sum_over_group` | x summed over the ranks, in fp32 |

Operators take a group by its name. The backward operators return the gradients that `needs` selects
from dx, dw and, for the column layer, db.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.nn import functions
from flux_megatron.ops import group_named
from flux_megatron.wgrad import plain_wgrad


@torch.library.custom_op("flux_megatron::column_parallel_linear", mutates_args=())
def column_parallel_linear(x: Tensor, w: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return functions.column_parallel_linear(x, w, bias, group=group_named(group))


@column_parallel_linear.register_fake
def _(x, w, bias, group):
    tokens = x.shape[0] * group_named(group).size()
    return x.new_empty(tokens, *x.shape[1:-1], w.shape[0])


@torch.library.custom_op("flux_megatron::column_parallel_linear_backward", mutates_args=())
def _column_backward(
    dy: Tensor, x: Tensor, w: Tensor, group: str, needs: Sequence[bool]
) -> list[Tensor]:
    options = functions._Options(group_named(group), plain_wgrad)
    rows = functions._rows(x) if needs[1] else None
    return _those_needed(functions.column_backward(dy, rows, w, x.shape, options, needs))


@torch.library.custom_op("flux_megatron::row_parallel_linear", mutates_args=())
def row_parallel_linear(x: Tensor, w: Tensor, group: str) -> Tensor:
    return functions.row_parallel_linear(x, w, group=group_named(group))


@row_parallel_linear.register_fake
def _(x, w, group):
    tokens = x.shape[0] // group_named(group).size()
    return x.new_empty(tokens, *x.shape[1:-1], w.shape[0])


@torch.library.custom_op("flux_megatron::row_parallel_linear_backward", mutates_args=())
def _row_backward(
    dy: Tensor, x: Tensor, w: Tensor, group: str, needs: Sequence[bool]
) -> list[Tensor]:
    options = functions._Options(group_named(group), plain_wgrad)
    rows = functions._rows(x) if needs[1] else None
    return _those_needed(functions.row_backward(dy, rows, w, x.shape, options, needs[0]))


@_column_backward.register_fake
@_row_backward.register_fake
def _(dy, x, w, group, needs):
    shapes = (x.shape, w.shape, w.shape[:1])
    return [dy.new_empty(shape) for shape, need in zip(shapes, needs, strict=False) if need]


def _those_needed(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group = inputs[-1]


def _column_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dy, _column_backward, 3)


def _row_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, dy, _row_backward, 2)


def _gradients(ctx: Any, dy: Tensor, backward: Any, count: int) -> tuple[Tensor | None, ...]:
    """A gradient or None for each of the `count` tensors of a layer, and None for its group."""
    needs = list(ctx.needs_input_grad[:count])
    made = iter(backward(dy, *ctx.saved_tensors, ctx.group, needs))
    return *(next(made) if need else None for need in needs), None


column_parallel_linear.register_autograd(_column_gradients, setup_context=_keep)
row_parallel_linear.register_autograd(_row_gradients, setup_context=_keep)


@torch.library.custom_op("flux_megatron::sum_over_group", mutates_args=())
def sum_over_group(x: Tensor, group: str) -> Tensor:
    """The sum of x over all ranks, on each of them; fp32 inside, fp64 for fp64."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    dist.all_reduce(total, group=group_named(group))
    return total.to(x.dtype)


@sum_over_group.register_fake
def _(x, group):
    return torch.empty_like(x)
