"""Forward of a linear layer, and backward as its dual.

| layer | fprop | dgrad | wgrad |
| --- | --- | --- | --- |
| column | AG(x) w^T | RS(dy w) | dy^T AG(x): x gathered again behind dgrad, or saved |
| row | RS(x w^T) | AG(dy) w | AG(dy)^T x: dy as dgrad has gathered it |
| local | x w^T | dy w, or AR(dy w), which hides behind wgrad | dy^T x |
| whole | AR(x w^T) | dy w | dy^T x |

The first two are those of sequence parallelism, the others have every token on every rank. The
weight keeps torch's layout [N, K]; dgrad reads it without a copy. In the column layer's backward
the scatter of dx also hides behind wgrad, and its sum comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops, pieces
from flux_megatron.wgrad import Deferred, plain_wgrad

_UNGUARDED = nullcontext()
Wgrad = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]


class Options(NamedTuple):
    """`layer` is a row of the table above: local and whole are column and row layers of ranks that
    all hold every token. `group` is the process group that communicates; None where none does.
    """

    layer: str
    group: Any
    wgrad: Wgrad = plain_wgrad
    save_gathered: bool = False


def _check_tokens(layer: str, x: Tensor, group: ProcessGroup) -> None:
    """Refuse x without tokens, and tokens that the ranks cannot share evenly."""
    expected = None
    if x.dim() < 2:
        expected = "[tokens, ..., features]"
    elif layer == "row" and x.shape[0] % group.size():
        expected = f"a first dimension divisible by the group's {group.size()} ranks"
    if expected:
        error = f"{layer}_parallel_linear: x {list(x.shape)} given, {expected} expected"
        ops.refuse(error, group, x.device)


def rows_of(tensor: Tensor) -> Tensor:
    """[s, ..., n] as the contiguous matrix [s * ..., n] that kernels take."""
    tensor = ops.awaited(tensor)
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _run_wgrad(wgrad: Wgrad, w: Tensor, dy: Tensor, x: Any) -> Tensor | None:
    with ops.phase("wgrad"):
        return wgrad(w, dy, x)


def _shaped(made: Tensor, shape: Sequence[int]) -> Tensor:
    """A new matrix, resized to another shape. Not a view: the caller of a Function may not modify
    one in place, as Megatron's loss does.
    """
    assert made.is_contiguous(), f"strides {made.stride()} given, contiguous rows expected"
    return made.resize_(*shape)  # which takes the host half as long as of a tuple


# Each layer is one node of autograd, reshapes included: every further node costs the host some
# microseconds in forward and in backward. Without gradients there is not even that one, as where
# activations are computed anew.


def forward(
    layer: str, x: Tensor, w: Tensor, bias: Tensor | None, group: Any, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """y; with `keep` also a copy of the rows that a column layer gathers."""
    rows, leading = rows_of(x), [*x.shape[:-1]]
    kept: list[Tensor] = []
    consume = (lambda gathered: kept.append(gathered.clone())) if keep else None
    with ops.phase("fprop"):
        if layer == "column":
            _check_tokens(layer, x, group)
            leading[0] *= group.size()
            y = ops.run_ag_gemm(rows, w, bias, group, consume=consume)
        elif layer == "row":
            _check_tokens(layer, x, group)
            leading[0] //= group.size()
            y = ops.run_gemm_rs(rows, w, group)
        else:
            y = rows @ w.t() if layer == "local" else ops.run_gemm_ar(rows, w, group)
            y = y if bias is None else y + bias
        return _shaped(y, (*leading, y.shape[1])), kept[0] if keep else None


def run(x: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """y, of a node of autograd where gradients are enabled."""
    if not torch.is_grad_enabled():
        return forward(options.layer, x, w, bias, options.group)[0]
    # Autograd copies x here only if it has gaps. Otherwise backward saves the caller's own tensor:
    # offload hooks read its attributes, and second derivatives need it.
    return LinearNode.apply(x.contiguous(), w, bias, options)


class LinearNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        needs_x = ctx.needs_input_grad[1] and not isinstance(options.wgrad, Deferred)
        keep = options.save_gathered and needs_x
        y, kept = forward(options.layer, x, w, bias, options.group, keep)
        # torch refuses a saved tensor that was changed in place: dx alone needs what w holds
        ctx.save_for_backward(
            kept if keep else x if needs_x else None, w if ctx.needs_input_grad[0] else None
        )
        ctx.options, ctx.shape = options, x.shape
        ctx.w = None if ctx.needs_input_grad[0] else w
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_grad_enabled():
            return *_double_backward(ctx, dy), None
        x, w = ctx.saved_tensors
        x, w = x if x is None else rows_of(x), ctx.w if w is None else w
        return *backward(dy, x, w, ctx.shape, ctx.options, ctx.needs_input_grad), None


# of each layer: its pattern, and the collectives on dy, x and dx in a backward that is
# differentiated again
_DOUBLE: dict[str, tuple[str, Any, Any, Any]] = {
    "column": ("gemm_rs", None, ops.differentiable.gather, ops.differentiable.scatter),
    "row": ("ag_gemm", ops.differentiable.gather, None, None),
    "local": ("gemm_ar", None, ops.differentiable.copy, ops.differentiable.reduce),
    "whole": ("gemm_ar", ops.differentiable.copy, None, None),
}


def _double_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw, db of torch's operations, for autograd to differentiate again."""
    pattern, of_dy, of_x, of_dx = _DOUBLE[ctx.options.layer]
    _note_double_backward(pattern, ctx.options)

    def through(collective: Any, tensor: Tensor) -> Tensor:
        group = ctx.options.group
        return tensor if collective is None or group is None else collective(tensor, group)

    (x, w), needs = ctx.saved_tensors, ctx.needs_input_grad
    dy = through(of_dy, dy.reshape(-1, dy.shape[-1]))
    dx = through(of_dx, dy @ w).reshape(ctx.shape) if needs[0] else None
    dw = dy.t() @ through(of_x, x.reshape(-1, x.shape[-1])) if needs[1] else None
    return dx, dw, dy.sum(0) if needs[2] else None


def _note_double_backward(pattern: str, options: Options) -> None:
    """Count a backward of which gradients are to be differentiated; `RuntimeError` where they
    cannot be.
    """
    if options.wgrad is not plain_wgrad or options.save_gathered:
        raise RuntimeError(
            f"{pattern}: create_graph=True given, but weight gradients are accumulated elsewhere, "
            "deferred, or formed of gathered rows that were kept: for second derivatives leave "
            "wgrad (gradient_accumulation_fusion) and save_gathered at their defaults"
        )
    ops.note_fallback(pattern, "create_graph=True: torch computes what is differentiated again")


def backward(
    dy: Tensor, x: Tensor | None, w: Tensor, shape: Sequence[int], options: Options,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw, db of a layer, each None where `needs` has False.

    x has the rows that forward saved, None if no gradient needs them; `shape` is that of dx.
    """
    dy, (needs_dx, needs_dw, needs_db) = rows_of(dy), needs[:3]
    if options.layer == "row":
        return *_row_backward(dy, x, w, shape, options, needs_dx), None
    column = options.layer == "column"
    group: Any = None if options.layer == "whole" else options.group
    gather = reduction = dx = dw = None
    with _UNGUARDED if group is None or not (column or needs_dx) else ops.guard(group, dy.device):
        with ops.phase("dgrad"):
            if column:
                gather, reduction = _column_dgrad(dy, x, w, options, needs_dx)
            elif needs_dx and group is None:
                dx = dy @ w
            elif needs_dx:
                reduction = pieces.start_gemm_ar(dy, w, group, layout="nn")
        rows = gather.complete() if gather else x
        try:
            if rows is not None or needs_dw:  # a `Deferred` has no rows
                dw = _run_wgrad(options.wgrad, w, dy, rows)
            db = dy.sum(0) if needs_db else None
        finally:  # an error of the caller ends no group: the others get what they wait for
            if gather:
                gather.close()
            if reduction:
                dx = reduction.finish()
    return None if dx is None else _shaped(dx, shape), dw, db


def _column_dgrad(
    dy: Tensor, x: Tensor | None, w: Tensor, options: Options, needs_dx: bool
) -> tuple[Any, Any]:
    """What is in flight for wgrad, if forward has kept a shard of x, and for dx."""
    local = None if options.save_gathered else x
    if local is not None and needs_dx:
        return pieces.start_gather_and_gemm_rs(local, dy, w, options.group)
    if local is not None:
        return pieces.start_gather(local, w, options.group), None
    return None, pieces.start_gemm_rs(dy, w, options.group, layout="nn") if needs_dx else None


def _row_backward(
    dy: Tensor, x: Tensor | None, w: Tensor, shape: Sequence[int], options: Options,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and dw; dw is None without x, the rows of forward."""
    dw: list[Tensor | None] = [None]
    group = options.group

    def weight_gradient(gathered_dy: Tensor) -> None:
        dw[0] = _run_wgrad(options.wgrad, w, gathered_dy, x)

    dx = None
    consume = weight_gradient if x is not None else None
    if needs_dx:
        with ops.phase("dgrad"):
            dx = ops.run_ag_gemm(dy, w, None, group, layout="nn", consume=consume)
        dx = _shaped(dx, shape)
    elif consume:
        with ops.guard(group, dy.device):
            gather = pieces.start_gather(dy, w, group, layout="nn")
            rows = gather.complete()
            try:
                consume(rows)
            finally:
                gather.close()
    return dx, dw[0]
