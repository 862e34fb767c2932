"""Measured plans on disk, with their provenance: the user's cache, then the entries we ship.

A file holds any number of entries. The user's cache has one file for each key, named after it and
replaced in one step, so that jobs that write at once lose nothing. What cannot be read is a miss
with a reason, never an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from flux_megatron.overlap import registry
from flux_megatron.overlap.environment import PACKAGE, Environment
from flux_megatron.problem import Plan, Problem

FORMAT = 1
NEIGHBOURHOOD = 2  # a plan is taken over from at most twice, or half, as many rows


@dataclass(frozen=True)
class Measured:
    plan: Plan
    median_us: float


@dataclass(frozen=True)
class Failed:
    plan: Plan
    reason: str


@dataclass(frozen=True)
class Entry:
    """The best plan of a problem in an environment, and how it was found.

    `untried` counts the plans for which there was no time. `noise_us` is how much `sequential`
    differs from itself between two calls of one round.
    """

    problem: Problem
    environment: Environment
    plan: Plan
    measured: tuple[Measured, ...]
    failed: tuple[Failed, ...]
    untried: int
    noise_us: float
    rounds: int
    date: str

    def dumps(self) -> str:
        """The entry as one line of JSON."""
        return json.dumps({**dataclasses.asdict(self), "problem": _written(self.problem)})

    @staticmethod
    def loads(text: str) -> Entry:
        """`ValueError` says what is not an entry of this version."""
        return _entry(json.loads(text))


class PlanCache:
    """The entries of some folders, for one environment; earlier folders come first."""

    def __init__(self, folders: Iterable[Path], environment: Environment) -> None:
        self.environment = environment
        self.entries: list[Entry] = []
        self.complaints: list[str] = []
        for folder in folders:
            entries, complaints = read_folder(folder / slug(environment.gpu))
            self.entries += entries
            self.complaints += complaints

    def find(self, problem: Problem) -> Entry | None:
        """The entry whose problem and environment are equal in every field."""
        return next(
            (e for e in self.entries if (e.problem, e.environment) == (problem, self.environment)),
            None,
        )

    def neighbours(self, problem: Problem) -> list[Entry]:
        """Entries of another M, within the neighbourhood, or of another environment.

        Of this GPU and this link. Those of the same M come first: an older driver or other sources
        change the winner less often than half the rows do. Then those of the same software, sources
        and CUDA_DEVICE_MAX_CONNECTIONS, then of the same setting, then the nearest.
        """
        mine = self.environment

        def distance(entry: Entry) -> float:
            return abs(math.log(entry.problem.M / problem.M))

        near = [
            e for e in self.entries
            if replace(e.problem, M=problem.M) == problem
            and distance(e) <= math.log(NEIGHBOURHOOD) + 1e-9
            and _machine(e.environment) == _machine(mine)
        ]  # fmt: skip

        def strangeness(entry: Entry) -> tuple[bool, bool, bool, float]:
            theirs, far = entry.environment, distance(entry)
            other_setting = theirs.max_connections != mine.max_connections
            return far > 0, theirs != mine, other_setting, far

        return sorted(near, key=strangeness)


def _machine(environment: Environment) -> tuple[str, str]:
    return environment.gpu, environment.link


def slug(gpu: str) -> str:
    """The folder of a GPU's entries: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def shipped() -> Path:
    """The folder of the entries we ship: inside an installed package, else in the checkout."""
    inside = PACKAGE / "configs" / "tuned"
    return inside if inside.is_dir() else PACKAGE.parent / "configs" / "tuned"


def read_folder(folder: Path) -> tuple[list[Entry], list[str]]:
    """All entries of the folder's JSON files, and what could not be read."""
    entries: list[Entry] = []
    complaints: list[str] = []
    for file in sorted(folder.glob("*.json")):
        _read_file(file, entries, complaints)
    return entries, complaints


def _read_file(file: Path, entries: list[Entry], complaints: list[str]) -> None:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        complaints.append(f"{file}: {error}")
        return
    raws = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(raws, list) or content.get("format") != FORMAT:
        complaints.append(f"{file}: format {FORMAT} and a list of entries expected")
        return
    for number, raw in enumerate(raws):
        try:
            entries.append(_entry(raw))
        except ValueError as error:  # noqa: PERF203, the others of the file may be good
            complaints.append(f"{file}, entry {number}: {error}")


def write_file(file: Path, entries: Iterable[Entry]) -> None:
    """Replace `file` by the entries, one a line; readers see the old file or the new one."""
    lines = ",\n".join(entry.dumps() for entry in entries)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=f".{file.stem}.", suffix=".partial", delete=False
    ) as partial:
        partial.write(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
    os.chmod(partial.name, 0o644)  # temporary files are private
    os.replace(partial.name, file)


def store(folder: Path, entry: Entry) -> Path:
    """Write the entry to the file of its key in the user's cache."""
    p = entry.problem
    key = json.dumps([_written(p), dataclasses.asdict(entry.environment)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    name = f"{p.pattern}_{p.M}x{p.N}x{p.K}_{p.layout}_{p.dtype}_tp{p.world_size}_{digest}.json"
    file = folder / slug(entry.environment.gpu) / name
    write_file(file, [entry])
    return file


def _written(problem: Problem) -> dict[str, Any]:
    """Its fields; without `beside` where nothing was, as entries were written before there was one
    beside others.
    """
    raw = dataclasses.asdict(problem)
    if not problem.beside:
        del raw["beside"]
    return raw


def _entry(raw: Any) -> Entry:
    if isinstance(raw, dict) and isinstance(raw.get("problem"), dict):
        raw = {**raw, "problem": {"beside": False, **raw["problem"]}}
    entry: Entry = _decode(Entry, raw, "entry")
    plans = [entry.plan, *(m.plan for m in entry.measured), *(f.plan for f in entry.failed)]
    known = registry.STRATEGIES[entry.problem.pattern]
    if strange := {plan.strategy for plan in plans} - known.keys():
        raise ValueError(f"strategies {sorted(strange)} given, {[*known]} expected")
    return entry


def _decode(kind: Any, raw: Any, where: str) -> Any:
    """`raw` as the type `kind`: all fields, each of its type; `ValueError` says what is not."""
    if get_origin(kind) is tuple and isinstance(raw, list):
        return tuple(_decode(get_args(kind)[0], item, f"{where}[]") for item in raw)
    if dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        hints = get_type_hints(kind)
        if raw.keys() != hints.keys():
            raise ValueError(f"{where}: fields {sorted(raw)} given, {sorted(hints)} expected")
        return kind(**{name: _decode(hints[name], raw[name], f"{where}.{name}") for name in raw})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(raw)
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:
        raise ValueError(f"{where}: {raw!r} given, {kind.__name__} expected")
    return raw
