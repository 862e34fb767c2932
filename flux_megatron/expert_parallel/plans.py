"""Measured plans of experts: entries of `tuning.plan_cache`, in a folder of their own.

They count for exactly their problem and environment. Nothing is estimated: without an entry the
first strategy that can run is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from flux_megatron import settings
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import plan_cache
from flux_megatron.tuning.plan_entry import AnyEntry


@dataclass(frozen=True)
class ExpertProblem:
    """Everything that a measured plan depends on, but the routing of the day.

    `operation` is "a2a_gemm" or "gemm_a2a", for layout "nn" as dgrad of the other one. A rank has
    `experts` of K columns in and N out, and gets `capacity` rows at most.
    """

    operation: str
    capacity: int
    experts: int
    N: int
    K: int
    dtype: str
    world_size: int
    layout: str = "nt"
    device: str = "cuda"
    beside: ClassVar = False  # nothing else runs while experts are timed

    def __str__(self) -> str:
        return (
            f"{self.operation} capacity {self.capacity} E={self.experts} N={self.N} K={self.K} "
            f"{self.layout} {self.dtype} over {self.world_size} ranks on {self.device}"
        )


@dataclass(frozen=True)
class ExpertEntry(AnyEntry):
    """That of experts."""

    FOLDER = "experts"
    _SIZES = "{0.capacity}x{0.experts}x{0.N}x{0.K}_{0.layout}_{0.dtype}_ep{0.world_size}"
    FILE = "{0.operation}_" + _SIZES

    problem: ExpertProblem


def kept(problem: ExpertProblem, device: torch.device) -> ExpertEntry | None:
    """The entry of exactly this problem, measured in this environment."""
    return plan_cache.opened(ExpertEntry, settings.get().cache, device).find(problem)


def agreed(problem: ExpertProblem, space: Workspace) -> Plan | None:
    """The plan that the group's leader has kept, on all ranks; None if it has none. Collective."""
    entry = kept(problem, space.device) if space.group.rank() == 0 else None
    answer, *_ = space.agreement.ask(str(problem), entry.plan.dumps() if entry else "")
    return Plan.loads(answer) if answer else None
