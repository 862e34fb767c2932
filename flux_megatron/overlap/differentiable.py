"""Collectives whose gradients can be differentiated again, by torch alone: for derivatives of
gradients, which nothing overlaps.

| | forward | backward |
| --- | --- | --- |
| `gather` | all ranks' rows | the sum of all ranks' gradients of this rank's rows |
| `scatter` | the sum of this rank's rows over all ranks | all ranks' gradients |
| `copy` | x, which all ranks have | the sum of all ranks' gradients |
| `reduce` | the sum over all ranks | the gradient, which all ranks have |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return _Gather.apply(x, group)


def scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return _Scatter.apply(x, group)


def copy(x: Tensor, group: ProcessGroup) -> Tensor:
    return _Copy.apply(x, group)


def reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return _Reduce.apply(x, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        shards = [x.new_empty(x.shape) for _ in range(group.size())]
        dist.all_gather(shards, x.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return scatter(dy, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group).chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gather(dy, ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce(dy, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return copy(dy, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Over all ranks, in fp32 at least."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)
