"""Both operations with one parameter [N, K] an expert, read where they lie.

Parameters that lie one distance apart in one storage are one strided tensor: nothing is copied, in
forward or in backward. Others are stacked in each forward, which is counted and reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flux_megatron.expert_parallel import ops
from flux_megatron.expert_parallel.wgrad import add_weight_gradient, weight_gradient
from flux_megatron.kernels.experts.weights import ExpertWeights, as_one
from flux_megatron.overlap.report import note_copy
from flux_megatron.symm.groups import name_of

# Gradients of the parameters of y = x w^T, or what autograd gets instead of them: of (parameters,
# dy, x, received), both [capacity, ...] and sorted by expert.
Wgrad = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], "Sequence[Tensor | None]"]


def a2a_gemm(
    x: Tensor, parameters: Sequence[Tensor], counts: Tensor, group: ProcessGroup, *, capacity: int,
    wgrad: Wgrad | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.a2a_gemm` for w = torch.stack(parameters); `wgrad` makes or keeps dw."""
    options = _Options(True, name_of(group), capacity, wgrad or plain_wgrad, _keeps(parameters))
    return _Node.apply(x, counts, options, *parameters)


def gemm_a2a(
    x: Tensor, parameters: Sequence[Tensor], counts: Tensor, group: ProcessGroup, *, tokens: int,
    wgrad: Wgrad | None = None,
) -> Tensor:  # fmt: skip
    """y of `ops.gemm_a2a` for w = torch.stack(parameters); `wgrad` makes or keeps dw."""
    options = _Options(False, name_of(group), tokens, wgrad or plain_wgrad, _keeps(parameters))
    return _Node.apply(x, counts, options, *parameters)[0]


def plain_wgrad(
    parameters: Sequence[Tensor], dy: Tensor, x: Tensor, received: Tensor
) -> Sequence[Tensor]:
    """The gradients themselves, views of one tensor."""
    return weight_gradient(dy, x, received).unbind(0)


def whole_wgrad(
    parameters: Sequence[Tensor], dy: Tensor, x: Tensor, received: Tensor
) -> Sequence[Tensor]:
    """That of one parameter [E, N, K]."""
    return (weight_gradient(dy, x, received),)


def add_weight_gradients(into: Sequence[Tensor], dy: Tensor, x: Tensor, received: Tensor) -> None:
    """Add each expert's gradient to its own of `into` [N, K], where these lie if that can be."""
    if view := as_one(into):
        add_weight_gradient(view, dy, x, received)
        return
    sizes = f"{len(into)} of {list(into[0].shape)}"
    note_copy("weight gradients of experts", f"{sizes} do not lie one distance apart")
    torch._foreach_add_(list(into), list(weight_gradient(dy, x, received)))


def in_one_storage(parameters: Sequence[Tensor]) -> None:
    """Move the parameters' data to one storage, in their order, unless they lie so already."""
    if as_one(parameters):
        return
    storage = parameters[0].data.new_empty(len(parameters), *parameters[0].shape)
    for parameter, own in zip(parameters, storage, strict=True):
        own.copy_(parameter.data)
        parameter.data = own


class _Options(NamedTuple):
    there: bool  # a2a_gemm, else gemm_a2a
    group: str
    rows: int  # the capacity, or the tokens that come back
    wgrad: Wgrad
    keep: bool  # the rows that come, for dw


def _keeps(parameters: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in parameters)


def _whole(parameters: Sequence[Tensor]) -> ExpertWeights:
    """All parameters as they lie, or copied; one [E, N, K] as it is."""
    if parameters[0].dim() == 3:
        return ExpertWeights(parameters[0].detach())
    if found := as_one(parameters):
        return found
    first = parameters[0]
    size_bytes = len(parameters) * first.nbytes
    reason = (
        f"{len(parameters)} of {list(first.shape)} do not lie one distance apart in one storage: "
        f"{size_bytes / 2**20:.1f} MiB a forward"
    )
    note_copy("weights of experts", reason)
    return ExpertWeights(torch.stack([parameter.detach() for parameter in parameters]))


class _Node(torch.autograd.Function):
    """Either operation: y, and what `a2a_gemm` has received. Its backward is the other one."""

    @staticmethod
    def forward(
        ctx, x: Tensor, counts: Tensor, options: _Options, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        w, received = _whole(parameters), None
        given = w.matrices, counts, options.rows, options.group, "nt", ""
        if options.there:
            y, received, rows = ops._a2a_gemm(x, *given, options.keep, w.reverse)
            ctx.mark_non_differentiable(received)
        else:
            y, rows = ops._gemm_a2a(x, *given, w.reverse), x if options.keep else None
        needs_w = ctx.needs_input_grad[0] or not options.there
        ctx.save_for_backward(w.matrices if needs_w else None, counts, received, rows)
        ctx.reverse, ctx.options, ctx.parameters = w.reverse, options, parameters
        ctx.tokens = len(x)
        return y, received

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, _: Tensor | None):
        w, counts, received, rows = ctx.saved_tensors
        options, dy, dx = ctx.options, dy.contiguous(), None
        given = w, counts, ctx.tokens, options.group, "nn", ""
        if not options.there:  # dy comes to its experts, as x is
            dx, received, dy = ops._a2a_gemm(dy, *given, options.keep, ctx.reverse)
        elif ctx.needs_input_grad[0]:
            dx = ops._gemm_a2a(dy, *given, ctx.reverse)
        dws: Sequence[Tensor | None] = (None,) * len(ctx.parameters)
        if options.keep:
            dws = options.wgrad(ctx.parameters, dy, rows, received)
        return dx, None, None, *dws
