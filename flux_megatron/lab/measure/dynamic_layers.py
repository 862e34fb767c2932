"""The four linears of a layer for `dynamic_rows.py`: by ours, and by NCCL and torch.mm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear
from flux_megatron.tune_command.widths import Model, Widths

MODELS = {
    "qwen3-32b": Widths(5120, 25600, 64, 8, 128, swiglu=True),
    "qwen3-8b": Widths(4096, 12288, 32, 8, 128, swiglu=True),
    "small": Widths(16, 24, 4, 2, 4, swiglu=True),
}


def linears(model: Model) -> tuple[tuple[bool, int, int], ...]:
    """(gathers, N, K) of qkv, proj, fc1 and fc2, of all ranks together."""
    hidden = model.hidden
    return (
        (True, model.qkv, hidden), (False, hidden, model.attention),
        (True, model.fc1, hidden), (False, hidden, model.ffn),
    )  # fmt: skip


class Linear:
    """One linear with operands of the largest M, of which a micro-batch takes the first rows."""

    def __init__(
        self, run: Run, gathers: bool, N: int, K: int, largest: int, backward: bool
    ) -> None:
        self.group, self.gathers, self.backward = run.group, gathers, backward
        self.rows = (run.group.size(), 1) if gathers else (1, run.group.size())  # x's, y's
        dtype = getattr(torch, run.about.dtype)
        kind = ColumnParallelLinear if gathers else RowParallelLinear
        self.module = kind(K, N, bias=False, group=run.group, device=run.device, dtype=dtype)
        self.weight = self.module.weight.requires_grad_(backward)
        N_local, K_local = self.weight.shape
        self._x = self.weight.new_empty(largest // self.rows[0], K_local)
        self._dy = self.weight.new_empty(largest // self.rows[1], N_local)
        self.operands = self._x, self._dy, self.weight
        self.take(largest)

    def take(self, M: int) -> None:
        self.x = self._x[: M // self.rows[0]].detach().requires_grad_(self.backward)
        self.dy = self._dy[: M // self.rows[1]]

    def ours(self) -> Tensor:
        if self.backward:
            return self.module(self.x)
        operation = ops.all_gather_gemm if self.gathers else ops.gemm_reduce_scatter
        return operation(self.x, self.weight, self.group)

    def by_nccl(self) -> Tensor:
        call = ByNccl.apply if self.backward else by_nccl
        return call(self.x, self.weight, self.group, self.gathers)


class Layer:
    """A layer of a model: its linears are called one after the other, with operands of their own.
    With `backward` the gradients of all operands follow, without a sum over layers.
    """

    def __init__(self, run: Run, widths: Widths, largest: int, backward: bool) -> None:
        self.backward = backward
        model = widths.layers(run.group.size())
        self.linears = [Linear(run, *one, largest, backward) for one in linears(model)]
        self.operands = [tensor for linear in self.linears for tensor in linear.operands]

    def take(self, M: int) -> None:
        """The next calls have M rows over all ranks."""
        for linear in self.linears:
            linear.take(M)

    def ours(self) -> list[Tensor]:
        return self._with_gradients([linear.ours() for linear in self.linears])

    def by_nccl(self) -> list[Tensor]:
        return self._with_gradients([linear.by_nccl() for linear in self.linears])

    def _with_gradients(self, results: list[Tensor]) -> list[Tensor]:
        if not self.backward:
            return results
        operands = [one for linear in self.linears for one in (linear.x, linear.weight)]
        dys = [linear.dy for linear in self.linears]
        return [*results, *torch.autograd.grad(results, operands, dys)]


def gather(x: Tensor, group: ProcessGroup, later: bool = False) -> tuple[Tensor, Any]:
    """x of all ranks; with `later` only after the work that is returned too."""
    whole = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    return whole, dist.all_gather_into_tensor(whole, x, group=group, async_op=later)


def scatter(y: Tensor, group: ProcessGroup, later: bool = False) -> tuple[Tensor, Any]:
    """This rank's rows of the sum; with `later` only after the work that is returned too."""
    mine = y.new_empty(y.shape[0] // group.size(), y.shape[1])
    return mine, dist.reduce_scatter_tensor(mine, y, group=group, async_op=later)


def by_nccl(x: Tensor, w: Tensor, group: ProcessGroup, gathers: bool) -> Tensor:
    if gathers:
        return torch.mm(gather(x, group)[0], w.t())
    return scatter(torch.mm(x, w.t()), group)[0]


class ByNccl(torch.autograd.Function):
    """`by_nccl`, whose backward of a column layer hides NCCL behind GEMMs as Megatron's own layer
    does: x is gathered beside dgrad, dx is scattered beside the weight's gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, group: ProcessGroup, gathers: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group, ctx.gathers = group, gathers
        return by_nccl(x, w, group, gathers)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        if not ctx.gathers:
            whole, _ = gather(dy, ctx.group)
            return torch.mm(whole, w), torch.mm(whole.t(), x), None, None
        whole, gathering = gather(x, ctx.group, later=True)
        summands = torch.mm(dy, w)
        gathering.wait()
        dx, scattering = scatter(summands, ctx.group, later=True)
        dw = torch.mm(dy.t(), whole)
        scattering.wait()
        return dx, dw, None, None
