"""Column- and row-parallel linear layers under sequence parallelism: forward, and backward as its
dual.

| layer | fprop | dgrad | wgrad |
| --- | --- | --- | --- |
| column | AG(x) w^T | RS(dy w) | dy^T AG(x): x gathered again behind dgrad, or saved |
| row | RS(x w^T) | AG(dy) w | AG(dy)^T x: dy as dgrad has gathered it |

The weight keeps torch's layout [N, K]; dgrad reads it without a copy. In the column layer's
backward the scatter of dx also hides behind wgrad, and its sum comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.ops import differentiable
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.wgrad import IntoMainGrad, plain_wgrad

Wgrad = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]


def column_parallel_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, group: ProcessGroup,
    wgrad: Wgrad | None = None, save_gathered: bool = False, dy_buffer: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """y = AG(x) w^T + bias.

    | tensor | shape (R = world size, s = sequence) |
    | --- | --- |
    | x | [s / R, ..., K] |
    | w, bias | [N / R, K], [N / R] |
    | result | [s, ..., N / R] |

    `save_gathered` keeps the gathered x for wgrad: R times the memory of x, one gather less in
    backward. `wgrad(w, dy, x)` returns the weight's gradient, or accumulates it elsewhere and
    returns None. With `dy_buffer`, backward appends dy to it and leaves wgrad to the caller. Errors
    are those of `ops.all_gather_gemm`. Under torch.compile the call is one operator; `wgrad` is
    None or `wgrad.IntoMainGrad` then, and there is no `dy_buffer`.
    """
    name = ops.name_of(group)
    x, w, bias = ops.local_shards(COLUMN, x, w, bias, group, "nt")
    if bias is not None and bias.dtype != x.dtype and bias.dtype.is_floating_point:
        y = column_parallel_linear(
            x, w, None, group=group, wgrad=wgrad, save_gathered=save_gathered, dy_buffer=dy_buffer
        )
        return y + bias  # as torch promotes them
    if ops.is_traced() and traceable("column_parallel_linear", wgrad, dy_buffer):
        from flux_megatron.nn import operators

        return operators.column_parallel_linear(
            x, w, main_grad(wgrad), name, group.size(), bias, save_gathered
        )[0]
    if not torch.is_grad_enabled():
        return _column_forward(x, _rows(x), w, bias, group)
    options = _Options(group, wgrad or plain_wgrad, save_gathered, dy_buffer)
    return _ColumnParallel.apply(dense(x), w, bias, options)


def row_parallel_linear(
    x: Tensor, w: Tensor, *, group: ProcessGroup, wgrad: Wgrad | None = None
) -> Tensor:
    """y = RS(x w^T).

    | tensor | shape (R = world size, s = sequence, a multiple of R) |
    | --- | --- |
    | x | [s, ..., K / R] |
    | w | [N, K / R] |
    | result | [s / R, ..., N] |

    `wgrad` as in `column_parallel_linear`. Errors are those of `ops.gemm_reduce_scatter`.
    """
    name = ops.name_of(group)
    x, w, _ = ops.local_shards(ROW, x, w, None, group, "nt")
    if ops.is_traced() and traceable("row_parallel_linear", wgrad):
        from flux_megatron.nn import operators

        return operators.row_parallel_linear(x, w, main_grad(wgrad), name, group.size())
    check_tokens(x, group)
    if not torch.is_grad_enabled():
        return _row_forward(x, _rows(x), w, group)
    return _RowParallel.apply(dense(x), w, _Options(group, wgrad or plain_wgrad))


def check_tokens(x: Tensor, group: ProcessGroup) -> None:
    """Refuse tokens that the ranks cannot share evenly."""
    if x.shape[0] % group.size():
        error = (
            f"row_parallel_linear: x {list(x.shape)} given, a first dimension divisible by the "
            f"group's {group.size()} ranks expected"
        )
        ops.refuse(error, group, x.device)


def traceable(name: str, wgrad: Wgrad | None, dy_buffer: list[Tensor] | None = None) -> bool:
    """Whether an operator can do it: it takes tensors, neither functions nor lists of the caller.

    Otherwise torch.compile breaks the graph here, or says why it cannot.
    """
    if dy_buffer is None and (wgrad is None or isinstance(wgrad, IntoMainGrad)):
        return True
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            f"{name}: a function as wgrad or a dy_buffer given, None or "
            "flux_megatron.wgrad.IntoMainGrad as wgrad expected under torch.compile"
        )
    return False


def main_grad(wgrad: Wgrad | None) -> Tensor | None:
    """The tensor to which a traceable `wgrad` adds."""
    return wgrad.main_grad if isinstance(wgrad, IntoMainGrad) else None


class _Options(NamedTuple):
    group: ProcessGroup
    wgrad: Wgrad
    save_gathered: bool = False
    dy_buffer: list[Tensor] | None = None


def _rows(tensor: Tensor) -> Tensor:
    """[s, ..., n] as the contiguous matrix [s * ..., n] that kernels take."""
    tensor = ops.awaited(tensor)
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def dense(x: Tensor) -> Tensor:
    """x, copied by autograd where it has gaps: backward keeps it as the caller's tensor, of which
    hooks that move saved tensors to the host read attributes, and second derivatives are taken.
    """
    return x if x.is_contiguous() else x.contiguous()


def _run_wgrad(wgrad: Wgrad, w: Tensor, dy: Tensor, x: Any) -> Tensor | None:
    with ops.phase("wgrad"):
        return wgrad(w, dy, x)


def _saved(ctx) -> tuple[Any, Tensor]:
    """The rows of x, or None if they were not saved, and the weight."""
    x, w = ctx.saved_tensors
    return x if x is None else _rows(x), w


def _shaped(made: Tensor, shape: Sequence[int]) -> Tensor:
    """A new matrix, resized to another shape. Not a view: the caller of a Function may not modify
    one in place, as Megatron's loss does.
    """
    assert made.is_contiguous(), f"strides {made.stride()} given, contiguous rows expected"
    return made.resize_(*shape)  # which takes the host half as long as of a tuple


def _like(y: Tensor, x: Tensor, tokens: int) -> Tensor:
    """A new y [tokens * ..., n] in the shape [tokens, ..., n], for x [s, ..., k]."""
    return _shaped(y, (tokens, *x.shape[1:-1], y.shape[1]))


# Each layer is one node of autograd, reshapes included: every further node costs the host some
# microseconds in forward and in backward. Without gradients there is not even that one, as where
# activations are computed anew.


def _column_forward(
    x: Tensor, rows: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup,
    consume: Callable[[Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    with ops.phase("fprop"):
        y = ops.run_ag_gemm(rows, w, bias, group, consume=consume)
        return _like(y, x, x.shape[0] * group.size())


def _row_forward(x: Tensor, rows: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    with ops.phase("fprop"):
        return _like(ops.run_gemm_rs(rows, w, group), x, x.shape[0] // group.size())


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
        needs_x = ctx.needs_input_grad[1] and options.dy_buffer is None
        rows = _rows(x)
        kept: list[Tensor] = []
        keep = options.save_gathered and needs_x
        consume = (lambda gathered: kept.append(gathered.clone())) if keep else None
        y = _column_forward(x, rows, w, bias, options.group, consume)
        ctx.save_for_backward(kept[0] if keep else x if needs_x else None, w)
        ctx.options, ctx.shape = options, x.shape
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_grad_enabled():
            collectives = {"of_x": differentiable.gather, "of_dx": differentiable.scatter}
            return *again(ctx, "gemm_rs", dy, ctx.options.group, **collectives), None
        x, w = _saved(ctx)
        gradients = column_backward(dy, x, w, ctx.shape, ctx.options, ctx.needs_input_grad)
        return *gradients, None


Collective = Callable[[Tensor, ProcessGroup], Tensor]


def again(
    ctx: Any, pattern: str, dy: Tensor, group: ProcessGroup | None, *,
    of_dy: Collective | None = None, of_x: Collective | None = None,
    of_dx: Collective | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw, db of torch's operations, for autograd to differentiate again, with these collectives
    over the group.
    """
    differentiated_again(pattern, ctx.options)

    def through(collective: Collective | None, tensor: Tensor) -> Tensor:
        return tensor if collective is None or group is None else collective(tensor, group)

    (x, w), needs = ctx.saved_tensors, ctx.needs_input_grad
    dy = through(of_dy, _flat(dy))
    dx = through(of_dx, dy @ w).reshape(ctx.shape) if needs[0] else None
    dw = dy.t() @ through(of_x, _flat(x)) if needs[1] else None
    return dx, dw, dy.sum(0) if needs[2] else None


def differentiated_again(pattern: str, options: Any) -> None:
    """Count a backward of which gradients are to be differentiated; `RuntimeError` where they
    cannot be.
    """
    kept = getattr(options, "save_gathered", False)
    if options.wgrad is not plain_wgrad or options.dy_buffer is not None or kept:
        raise RuntimeError(
            f"{pattern}: create_graph=True given, but weight gradients are accumulated elsewhere, "
            "deferred, or formed of gathered rows that were kept: for second derivatives leave "
            "wgrad (gradient_accumulation_fusion), dy_buffer and save_gathered at their defaults"
        )
    ops.note_fallback(pattern, "create_graph=True: torch computes what is differentiated again")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def column_backward(
    dy: Tensor, x: Tensor | None, w: Tensor, shape: Sequence[int], options: _Options,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dw, db of `column_parallel_linear`, each None where `needs` has False.

    x has the rows that forward saved, None if no gradient needs them; `shape` is that of dx.
    """
    needs_dx, needs_dw, needs_db = needs[:3]
    dy = _rows(dy)
    gather = scatter = dx = dw = None
    local = None if options.save_gathered else x
    with ops.guard(options.group, dy.device):
        with ops.phase("dgrad"):
            if local is not None and needs_dx:
                gather, scatter = ops.start_gather_and_gemm_rs(local, dy, w, options.group)
            elif local is not None:
                gather = ops.start_gather(local, w, options.group)
            elif needs_dx:
                scatter = ops.start_gemm_rs(dy, w, options.group, layout="nn")
        if x is not None:
            dw = _run_wgrad(options.wgrad, w, dy, gather.complete() if gather else x)
        elif needs_dw and options.dy_buffer is not None:
            options.dy_buffer.append(dy)
        if gather:
            gather.close()
        db = dy.sum(0) if needs_db else None
        if scatter:
            dx = _shaped(scatter.finish(), shape)
    return dx, dw, db


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, options: _Options) -> Tensor:
        rows = _rows(x)
        y = _row_forward(x, rows, w, options.group)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        ctx.options, ctx.shape = options, x.shape
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_grad_enabled():
            return again(ctx, "ag_gemm", dy, ctx.options.group, of_dy=differentiable.gather)
        x, w = _saved(ctx)
        needs_dx = ctx.needs_input_grad[0]
        return *row_backward(dy, x, w, ctx.shape, ctx.options, needs_dx), None


def row_backward(
    dy: Tensor, x: Tensor | None, w: Tensor, shape: Sequence[int], options: _Options,
    needs_dx: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and dw of `row_parallel_linear`; dw is None without x, the rows of forward."""
    dw: list[Tensor | None] = [None]

    def weight_gradient(gathered_dy: Tensor) -> None:
        dw[0] = _run_wgrad(options.wgrad, w, gathered_dy, x)

    dy = _rows(dy)
    dx = None
    consume = weight_gradient if x is not None else None
    if needs_dx:
        with ops.phase("dgrad"):
            dx = ops.run_ag_gemm(dy, w, None, options.group, layout="nn", consume=consume)
        dx = _shaped(dx, shape)
    elif consume:
        with ops.guard(options.group, dy.device):
            gather = ops.start_gather(dy, w, options.group, layout="nn")
            consume(gather.complete())
            gather.close()
    return dx, dw[0]
