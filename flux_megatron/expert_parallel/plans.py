"""Measured plans of experts: entries of `tuning.plan_cache`, in a folder of their own.

They count for exactly their problem and environment. Nothing is estimated: without an entry the
first strategy that can run is taken.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from flux_megatron import settings
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import environment, plan_cache
from flux_megatron.tuning.choice import user_folder
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_cache import Entries
from flux_megatron.tuning.plan_entry import AnyEntry

ROOM = "expert_parallel"


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

    def __str__(self) -> str:
        return (
            f"{self.operation} capacity {self.capacity} E={self.experts} N={self.N} K={self.K} "
            f"{self.layout} {self.dtype} over {self.world_size} ranks on {self.device}"
        )


@dataclass(frozen=True)
class ExpertEntry(AnyEntry):
    """That of experts. Older ones do not say that no plan was `untried`."""

    FOLDER = "experts"
    _SIZES = "{0.capacity}x{0.experts}x{0.N}x{0.K}_{0.layout}_{0.dtype}_ep{0.world_size}"
    FILE = "{0.operation}_" + _SIZES

    problem: ExpertProblem
    untried: int = field(default=0, kw_only=True)


def here(device: torch.device, plan: Plan) -> Environment:
    """The environment of this process, with the sources of the plan's strategy."""
    return environment.of(device, plan.strategy, ROOM)


def kept(problem: ExpertProblem, device: torch.device) -> ExpertEntry | None:
    """The entry of exactly this problem, measured in this environment."""
    return _opened(settings.get().cache, device).find(problem)


def keep(entry: ExpertEntry, device: torch.device) -> Path:
    """Use the entry from now on, here and in later runs. `OSError` where it cannot be written."""
    folder = settings.get().cache
    _opened(folder, device).entries.insert(0, entry)
    return plan_cache.store(user_folder(folder), entry)


def agreed(problem: ExpertProblem, space: Workspace) -> Plan | None:
    """The plan that the group's leader has kept, on all ranks; None if it has none. Collective."""
    entry = kept(problem, space.device) if space.group.rank() == 0 else None
    answer, *_ = space.agreement.ask(str(problem), entry.plan.dumps() if entry else "")
    return Plan.loads(answer) if answer else None


@lru_cache(maxsize=8)
def _opened(folder: Path, device: torch.device) -> Entries[ExpertEntry]:
    """The user's entries, then those we ship; what cannot be read is left out with a warning."""
    found = Entries(
        ExpertEntry, [user_folder(folder), plan_cache.shipped()],
        lambda strategy: environment.of(device, strategy, ROOM),
    )  # fmt: skip
    for reason in found.left_out:
        text = f"flux_megatron: measured plans of experts are left out, or read in part: {reason}"
        warnings.warn(text, stacklevel=2)
    return found
