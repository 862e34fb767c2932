"""The operations as torch custom operators, which torch.compile keeps whole. Each is made of a
function of `ops`, and takes a group's name and a plan's text in place of the two.

Whoever keeps compiled graphs on disk finds them by their operators' arguments. So the R ranks of
the group, by which shapes differ, are one: a group of another size may have the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flux_megatron.overlap import differentiable
from flux_megatron.problem import plan_of
from flux_megatron.scaling import is_fp8, scaling_of
from flux_megatron.symm.groups import group_named


def all_gather_gemm(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.library.custom_op("flux_megatron::all_gather_gemm", mutates_args=())
    def operator(
        x: Tensor, w: Tensor, bias: Tensor | None, group: str, R: int, layout: str, plan: str,
        x_scale: Tensor | None = None, w_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
    ) -> Tensor:  # fmt: skip
        scaling = scaling_of(x_scale, w_scale, out_dtype, split_accumulator)
        ranks, given = group_named(group), plan_of(plan)
        return run(x, w, bias, ranks, layout=layout, plan=given, scaling=scaling)

    @operator.register_fake
    def _(x, w, bias, group, R, layout, plan, x_scale=None, w_scale=None, dtype=None, split=False):
        return _made(x.shape[0] * R, x, w, layout, dtype)

    return operator


def gemm_reduce_scatter(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.library.custom_op("flux_megatron::gemm_reduce_scatter", mutates_args=())
    def operator(
        x: Tensor, w: Tensor, group: str, R: int, layout: str, plan: str,
        x_scale: Tensor | None = None, w_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None, split_accumulator: bool = False,
    ) -> Tensor:  # fmt: skip
        scaling = scaling_of(x_scale, w_scale, out_dtype, split_accumulator)
        return run(x, w, group_named(group), layout=layout, plan=plan_of(plan), scaling=scaling)

    @operator.register_fake
    def _(x, w, group, R, layout, plan, x_scale=None, w_scale=None, dtype=None, split=False):
        return _made(x.shape[0] // R, x, w, layout, dtype)

    return operator


def gemm_all_reduce(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.library.custom_op("flux_megatron::gemm_all_reduce", mutates_args=())
    def operator(x: Tensor, w: Tensor, group: str, layout: str, plan: str) -> Tensor:
        return run(x, w, group_named(group), layout=layout, plan=plan_of(plan))

    @operator.register_fake
    def _(x, w, group, layout, plan):
        return _made(x.shape[0], x, w, layout)

    operator.register_autograd(_local_gradients, setup_context=_keep_operands)
    return operator


def _made(rows: int, x: Tensor, w: Tensor, layout: str, dtype: torch.dtype | None = None) -> Tensor:
    """What an operator makes, for torch to see its shape and dtype."""
    dtype = dtype or (torch.bfloat16 if is_fp8(x) else x.dtype)
    return x.new_empty(rows, w.shape[0 if layout == "nt" else 1], dtype=dtype)


def _keep_operands(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, ctx.group, ctx.layout, _ = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _local_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    if torch.is_grad_enabled():  # to be differentiated again: dy is that of all ranks
        dy = differentiable.copy(dy, group_named(ctx.group))
    nt = ctx.layout == "nt"
    dx = None if w is None else dy @ (w if nt else w.t())
    dw = None if x is None else (dy.t() @ x if nt else x.t() @ dy)
    return dx, dw, None, None, None
