"""Linear layers whose ranks all hold every token: Megatron's without sequence parallelism.

| layer | fprop | dgrad | wgrad |
| --- | --- | --- | --- |
| column | x w^T | AR(dy w) | dy^T x, which hides the all-reduce |
| row | AR(x w^T) | dy w | dy^T x |

R is the number of ranks; each has a shard of the weight, of N in a column layer, of K in a row one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.nn import functions
from flux_megatron.nn.functions import Wgrad
from flux_megatron.patterns import Pattern
from flux_megatron.wgrad import plain_wgrad


def local_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, wgrad: Wgrad | None = None,
    allreduce_group: ProcessGroup | None = None, dy_buffer: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """y = x w^T + bias, a column layer: x [..., K], w [N / R, K] -> y [..., N / R].

    With `allreduce_group` backward sums dx over it by GEMM+AR, hidden behind wgrad. `wgrad` and
    `dy_buffer` as in `functions.column_parallel_linear`. Errors are those of `ops.gemm_all_reduce`.
    """
    if allreduce_group is not None:
        x = ops.local("x", x, None, allreduce_group.group_name)
        w = ops.local("w", w, 0, allreduce_group.group_name)
    if ops.is_traced() and functions.traceable("local_linear", wgrad, dy_buffer):
        from flux_megatron.nn import operators

        name, R = ("", 1) if (g := allreduce_group) is None else (g.group_name, g.size())
        return operators.local_linear(x, w, functions.main_grad(wgrad), name, R, bias)
    options = _Options(None, allreduce_group, wgrad or plain_wgrad, dy_buffer)
    return _AllReduced.apply(functions.dense(x), w, bias, options)


def row_linear(x: Tensor, w: Tensor, *, group: ProcessGroup, wgrad: Wgrad | None = None) -> Tensor:
    """y = AR(x w^T), a row layer: x [..., K / R], w [N, K / R] -> y [..., N].

    y is the same on all ranks. `wgrad` as in `functions.column_parallel_linear`. Errors are those
    of `ops.gemm_all_reduce`.
    """
    name = ops.name_of(group)  # without a group y would be this rank's share alone
    x, w, _ = ops.local_shards(Pattern.GEMM_AR, x, w, None, group, "nt")
    if ops.is_traced() and functions.traceable("row_linear", wgrad):
        from flux_megatron.nn import operators

        return operators.row_linear(x, w, functions.main_grad(wgrad), name, group.size())
    options = _Options(group, None, wgrad or plain_wgrad)
    return _AllReduced.apply(functions.dense(x), w, None, options)


_NOTHING = nullcontext()


class _Options(NamedTuple):
    """The groups over which y and dx are summed; None where a rank's own is whole."""

    fprop_group: ProcessGroup | None
    dgrad_group: ProcessGroup | None
    wgrad: Wgrad
    dy_buffer: list[Tensor] | None = None


class _AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
        needs_x = ctx.needs_input_grad[1] and options.dy_buffer is None
        rows = functions._rows(x)
        ctx.save_for_backward(x if needs_x else None, w)
        ctx.options, ctx.shape = options, x.shape
        with ops.phase("fprop"):
            if options.fprop_group is None:
                y = rows @ w.t()
            else:
                y = ops.run_gemm_ar(rows, w, options.fprop_group)
            y = y if bias is None else y + bias
        return functions._shaped(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        if torch.is_grad_enabled():
            # What all ranks have, each uses for its shard of the weight.
            if (group := ctx.options.fprop_group) is not None:
                of_dy = ops.differentiable.copy
                return *functions.again(ctx, "gemm_ar", dy, group, of_dy=of_dy), None
            of_x, of_dx = ops.differentiable.copy, ops.differentiable.reduce
            group = ctx.options.dgrad_group
            return *functions.again(ctx, "gemm_ar", dy, group, of_x=of_x, of_dx=of_dx), None
        x, w = functions._saved(ctx)
        gradients = local_backward(dy, x, w, ctx.shape, ctx.options, ctx.needs_input_grad)
        return *gradients, None


def local_backward(
    dy: Tensor, x: Tensor | None, w: Tensor, shape: Sequence[int], options: _Options,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw, db as `functions.column_backward` gives them; dx is summed over `dgrad_group`."""
    needs_dx, needs_dw, needs_db = needs[:3]
    group = options.dgrad_group
    dy = functions._rows(dy)
    dx = reduction = dw = None
    with _NOTHING if group is None or not needs_dx else ops.guard(group, dy.device):
        if needs_dx:
            with ops.phase("dgrad"):
                if group is None:
                    dx = dy @ w
                else:
                    reduction = ops.start_gemm_ar(dy, w, group, layout="nn")
        if x is not None:
            dw = functions._run_wgrad(options.wgrad, w, dy, x)
        elif needs_dw and options.dy_buffer is not None:
            options.dy_buffer.append(dy)
        db = dy.sum(0) if needs_db else None
        if reduction is not None:
            dx = reduction.finish()
    return None if dx is None else functions._shaped(dx, shape), dw, db
