"""Experts to whom a token travels once a rank, not once an expert.

`route` tells all ranks what each token has chosen. `send` brings x [T, K] to each rank that has an
expert of the token and spreads it there over rows sorted by expert. `give_back` adds up a token's
rows on each rank, in fp32 and in the order of experts, rounds, and adds up ranks in their order.
Each of the two is the other's backward. GEMMs and what lies between them are local; rows are
multiplied by their weights there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from flux_megatron.dispatch import refuse
from flux_megatron.expert_parallel import once_calls
from flux_megatron.expert_parallel.separate import Wgrad, _whole, plain_wgrad, whole_wgrad
from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.token_call import Routes
from flux_megatron.kernels.experts.weights import ExpertWeights, as_one
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.report import note_copy
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace

Travel = Callable[[Tensor, Routes, Workspace], Tensor]


def refuses(x: Tensor, group: ProcessGroup) -> str | None:
    """Why tokens x cannot travel once, or None; the same on all ranks."""
    space = workspace(group, x.device)
    if reason := space.unavailable or launch.supports_tensors(x.dtype, x.device.type):
        return reason
    if space.world_size > 31:
        return f"{space.world_size} ranks, at most 31 expected"
    if x.device.type == "cpu":
        return None
    if x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] != 9:
        return "the library's grouped GEMM takes only bfloat16 on Hopper"
    return f"tokens of {x.shape[-1]} columns, a multiple of 8 expected" if x.shape[-1] % 8 else None


def route(
    chosen: Tensor, weights: Tensor, group: ProcessGroup, *, topk: int, capacity: int,
    reverse: bool = False,
) -> tuple[Routes, Tensor]:  # fmt: skip
    """The routes of all ranks' tokens, and the weight of each row here, fp32 [capacity].

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | chosen | bool [T, R E], at most `topk` of a token; T the same on all ranks |
    | weights | [T, R E], differentiable, of any floating dtype |

    Rows are sorted by (expert, source rank, token), with `reverse` the last expert's first.
    `capacity` bounds the rows of a rank. `CapacityExceeded` on every rank where more come or a
    token has chosen more, at the next call or check on GPUs.
    """
    space = workspace(group, chosen.device)
    if error := _error(weights, chosen, space, topk, capacity):
        refuse(f"route: {error}", group, chosen.device)
    return _Route.apply(weights, chosen.contiguous(), group, topk, capacity, reverse)


def send(x: Tensor, routes: Routes, group: ProcessGroup) -> Tensor:
    """Rows [capacity, K] of x [T, K] of all ranks, undefined behind those that came."""
    if error := refuses(x, group):
        refuse(f"send: {error}", group, x.device)
    return _Travel.apply(x.contiguous(), routes, group, once_calls.sent, once_calls.given_back)


def give_back(rows: Tensor, routes: Routes, group: ProcessGroup) -> Tensor:
    """y [T, N]: the sum of each token's rows [capacity, N] on all ranks."""
    return _Travel.apply(rows.contiguous(), routes, group, once_calls.given_back, once_calls.sent)


def multiply(
    rows: Tensor, parameters: Sequence[Tensor] | Tensor, routes: Routes, wgrad: Wgrad | None = None
) -> Tensor:
    """Each expert's rows times its parameter [N, K], of which the first is that of the first rows,
    or its of one [E, N, K]; `wgrad` makes or keeps dw.
    """
    if isinstance(parameters, Tensor):
        return _Multiply.apply(rows, routes, whole_wgrad, parameters)
    return _Multiply.apply(rows, routes, wgrad or plain_wgrad, *parameters)


def lie_in_reverse(parameters: Sequence[Tensor]) -> bool:
    """Whether they lie one distance apart in one storage, the last one first."""
    found = as_one(parameters)
    return found is not None and found.reverse


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, chosen: Tensor, group: ProcessGroup, topk: int, capacity: int,
        reverse: bool,
    ) -> tuple[Routes, Tensor]:  # fmt: skip
        space = workspace(group, chosen.device)
        made = once_calls.routed(weights.contiguous(), chosen, space, topk, capacity, reverse)
        ctx.group, ctx.routes = group, made[0]
        ctx.save_for_backward(weights)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, gradients: Tensor):
        (weights,) = ctx.saved_tensors
        space = workspace(ctx.group, weights.device)  # a `release` may have made it anew
        found = once_calls.returned(gradients.contiguous(), ctx.routes, weights, space)
        return found, *(None,) * 5


def _error(
    weights: Tensor, chosen: Tensor, space: Workspace, topk: int, capacity: int
) -> str | None:
    if chosen.dtype != torch.bool or chosen.dim() != 2 or chosen.shape[1] % space.world_size:
        given = f"chosen {list(chosen.shape)} {chosen.dtype}"
        return f"{given} given, bool [T, ranks * experts] expected"
    if weights.shape != chosen.shape or not len(chosen):
        given = f"weights {list(weights.shape)} and chosen {list(chosen.shape)}"
        return f"{given} given, equal ones of at least one token expected"
    if not 0 < capacity < 2**31 or topk < 1:
        return f"capacity {capacity} and topk {topk} given, at least 1 expected"
    return space.unavailable


class _Travel(torch.autograd.Function):
    """One of `once_calls.sent` and `given_back`, whose backward is the other."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, routes: Routes, group: ProcessGroup, call: Travel, back: Travel
    ) -> Tensor:
        ctx.routes, ctx.group, ctx.back = routes, group, back
        return call(given, routes, workspace(group, given.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        space = workspace(ctx.group, gradient.device)
        return ctx.back(gradient.contiguous(), ctx.routes, space), *(None,) * 4


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, routes: Routes, wgrad: Wgrad, *parameters: Tensor
    ) -> Tensor:
        w = _whole(parameters)
        if w.reverse:
            note_copy("weights of experts", f"{len(parameters)} lie in reverse, their rows do not")
        ctx.keep = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(w.matrices, rows if ctx.keep else None)
        ctx.reverse, ctx.routes, ctx.wgrad, ctx.parameters = w.reverse, routes, wgrad, parameters
        return _grouped(rows, w, routes.ends, "nt")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        matrices, rows = ctx.saved_tensors
        dy, routes, drows = dy.contiguous(), ctx.routes, None
        if ctx.needs_input_grad[0]:
            drows = _grouped(dy, ExpertWeights(matrices, ctx.reverse), routes.ends, "nn")
        dws: Sequence[Tensor | None] = (None,) * len(ctx.parameters)
        if ctx.keep:
            dws = ctx.wgrad(ctx.parameters, dy, rows, routes.received)
        return drows, None, None, *dws


def _grouped(rows: Tensor, w: ExpertWeights, ends: Tensor, layout: str) -> Tensor:
    """Each expert's rows times w[e]^T ("nn": w[e]), undefined behind them. On GPUs the host does
    not read `ends`.
    """
    with phase("experts' GEMM"):
        if rows.is_cuda:
            matrices = w.matrices.flip(0) if w.reverse else w.matrices
            right = matrices.transpose(1, 2) if layout == "nt" else matrices
            return functional.grouped_mm(rows, right, offs=ends)
        y, first = rows.new_empty(len(rows), w.columns(layout)), 0
        for expert, end in enumerate(ends.tolist()):
            matrix = w.of(expert)
            right = matrix.t() if layout == "nt" else matrix
            torch.mm(rows[first:end], right, out=y[first:end])
            first = end
        return y
