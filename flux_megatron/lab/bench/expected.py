"""What a case must give: the reference on the operands of all ranks, in a wider dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import reference
from flux_megatron.patterns import Pattern


def of_pattern(pattern: Pattern, x: Tensor, w: Tensor, layout: str, group: ProcessGroup) -> Tensor:
    """This rank's y, from the x and w of all ranks. Collective."""
    compute, xs = reference.PATTERNS[pattern], _of_all(x, group)
    if pattern.spec.gathers:  # the w of others gives the y of others
        return compute(xs, [widened(w)], layout)[0]
    return compute(xs, _of_all(w, group), layout)[group.rank()]


def widened(tensor: Tensor) -> Tensor:
    """In fp64 for fp32, else in fp32: the reference rounds nothing of it."""
    wide = torch.float64 if tensor.dtype == torch.float32 else torch.float32
    return tensor.detach().to(wide)


def _of_all(mine: Tensor, group: ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(shards, mine.detach().contiguous(), group=group)
    return [widened(shard) for shard in shards]
