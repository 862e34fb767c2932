"""An all-reduce in two shots: the reduce-scatter of a strategy, then an all-gather of its sums.

The scatter hides behind the strategy's GEMM. The sums are formed as soon as it ends, so that copy
engines gather them behind what the caller enqueues before `finish`, such as wgrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flux_megatron.overlap import transfer
from flux_megatron.problem import Problem
from flux_megatron.symm.workspace import Workspace


def supports(problem: Problem) -> str | None:
    """Why the rows cannot be scattered, or None: every rank sums equally many."""
    if problem.M % problem.world_size:
        return f"{problem.M} rows cannot be divided over {problem.world_size} ranks"
    return None


class Scatter(Protocol):
    def finish(self) -> Tensor: ...


@dataclass(frozen=True)
class AllReduce:
    """Sums in flight to all ranks."""

    gather: transfer.Gather

    def finish(self) -> Tensor:
        """y [M, N]."""
        gathered = self.gather.complete()  # the workspace's
        y = torch.empty_like(gathered).copy_(gathered)
        self.gather.close()
        return y


def start(scatter: Scatter, workspace: Workspace) -> AllReduce:
    """Gather the rows [M_shard, N] that `scatter` sums on each rank; `finish` gives y [M, N]."""
    return AllReduce(transfer.start_gather(scatter.finish(), workspace, 0))
