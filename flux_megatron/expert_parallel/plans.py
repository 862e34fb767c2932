"""Measured plans of experts: one file a problem, in the user's cache and in that of what we ship.

They are kept as `tuning.plan_cache` keeps those of linear layers, and count for exactly their
problem and environment. A `Problem` has no experts and no capacity, so these have a type and a
folder of their own. Nothing is estimated: without an entry the first strategy that can run is
taken.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from flux_megatron import settings
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import environment, plan_cache
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_entry import Failed, Measured, decode

ROOM = "expert_parallel"
FOLDER = "experts"  # of a GPU's folder, whose own files are of linear layers


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
class ExpertEntry:
    """The best plan of a problem in an environment: as `tuning.plan_entry.Entry`."""

    problem: ExpertProblem
    environment: Environment
    plan: Plan
    measured: tuple[Measured, ...]
    failed: tuple[Failed, ...]
    noise_us: float
    rounds: int
    date: str

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> ExpertEntry:
        """`ValueError` says what is not an entry of this version."""
        entry: ExpertEntry = decode(ExpertEntry, json.loads(text), "entry", [])
        return entry


def here(device: torch.device, plan: Plan) -> Environment:
    """The environment of this process, with the sources of the plan's strategy."""
    return environment.of(device, plan.strategy, ROOM)


def kept(problem: ExpertProblem, device: torch.device) -> ExpertEntry | None:
    """The entry of exactly this problem, measured in this environment."""
    entries = _read(settings.get().cache, device)
    return next(
        (e for e in entries if e.problem == problem and e.environment == here(device, e.plan)), None
    )


def keep(entry: ExpertEntry, device: torch.device) -> Path:
    """Use the entry from now on, here and in later runs. `OSError` where it cannot be written."""
    folder = settings.get().cache
    _read(folder, device).insert(0, entry)
    p, where = entry.problem, replace(entry.environment, sources="")
    key = json.dumps([asdict(p), asdict(where)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    sizes = f"{p.capacity}x{p.experts}x{p.N}x{p.K}_{p.layout}_{p.dtype}_ep{p.world_size}"
    folder = folder / "plans" / plan_cache.slug(where.gpu) / FOLDER
    file = folder / f"{p.operation}_{sizes}_{digest}.json"
    plan_cache.write_file(file, [entry])
    return file


def agreed(problem: ExpertProblem, space: Workspace) -> Plan | None:
    """The plan that the group's leader has kept, on all ranks; None if it has none. Collective."""
    entry = kept(problem, space.device) if space.group.rank() == 0 else None
    answer, *_ = space.agreement.ask(str(problem), entry.plan.dumps() if entry else "")
    return Plan.loads(answer) if answer else None


@lru_cache(maxsize=8)
def _read(folder: Path, device: torch.device) -> list[ExpertEntry]:
    """The user's entries, then those we ship; what cannot be read is left out with a warning."""
    slug = plan_cache.slug(environment.of(device).gpu)
    files = [
        file
        for root in (folder / "plans", plan_cache.shipped())
        for file in sorted((root / slug / FOLDER).glob("*.json"))
    ]
    return [entry for file in files for entry in _read_file(file)]


def _read_file(file: Path) -> list[ExpertEntry]:
    try:
        entries = json.loads(file.read_text())["entries"]
        return [ExpertEntry.loads(json.dumps(entry)) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"flux_megatron: measured plans of experts are left out: {file}: {error!r}"
        warnings.warn(text, stacklevel=2)
        return []
