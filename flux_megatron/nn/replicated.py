"""Parameters that every rank holds whole and uses on its own tokens, such as a norm's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.nn import operators


def sum_gradient(parameter: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """`parameter` as it is; in backward its gradient is summed over `group`, the world if None.

        y = F.rms_norm(x, (hidden,), sum_gradient(self.weight, group=group))

    The tokens of one rank give a partial sum of the gradient of a parameter that all ranks hold.
    `sum_gradient` gives each rank the whole sum, by one fp32 all-reduce, so the same optimizer
    steps keep the copies equal. `ValueError` for a group without this rank.
    """
    return SumGradient.apply(parameter, ops.name_of(joined(group, "sum_gradient")))


def joined(group: ProcessGroup | None, name: str) -> ProcessGroup:
    """`group`, or the world if it is None. `ValueError`, with the caller's `name`, if this rank is
    not in it or no group exists yet.
    """
    if group is None and not dist.is_initialized():
        raise ValueError(
            f"{name}: no process group given or initialized, "
            "torch.distributed.init_process_group expected before"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):  # what torch gives to ranks outside
        raise ValueError(
            f"{name}: a group without rank {dist.get_rank()} given, one with this rank expected"
        )
    return group


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: str) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # to be differentiated again
            return ops.differentiable.reduce(gradient, ops.group_named(ctx.group)), None
        return operators.sum_over_group(gradient, ctx.group), None
