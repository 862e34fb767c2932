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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return _FORWARD[name](x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _Collective.apply(dy, ctx.group, _BACKWARD[ctx.name]), None, None


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    shards = [x.new_empty(x.shape) for _ in range(group.size())]
    dist.all_gather(shards, x.contiguous(), group=group)
    return torch.cat(shards)


def _scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    return _summed(x, group).chunk(group.size())[group.rank()].clone()


def _copied(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Over all ranks, in fp32 at least."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


_FORWARD = {"gather": _gathered, "scatter": _scattered, "copy": _copied, "reduce": _summed}
_BACKWARD = {"gather": "scatter", "scatter": "gather", "copy": "reduce", "reduce": "copy"}


def _named(name: str) -> Callable[[Tensor, ProcessGroup], Tensor]:
    return lambda x, group: _Collective.apply(x, group, name)


gather, scatter = _named("gather"), _named("scatter")
copy, reduce = _named("copy"), _named("reduce")
