"""One entry of a file of measured plans: what it says, and how it is read.

`FORMAT` rises when a field changes its meaning. A new field needs no new format: its default means
"as before", so that an entry without it stays true.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from flux_megatron.overlap import registry
from flux_megatron.problem import Plan, Problem, own_fields
from flux_megatron.tuning.environment import Environment

FORMAT = 5


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
    """The best plan of a problem in an environment, and how it was found. `FILE` is how its file is
    called after the problem.

    `untried` counts plans for which a time limit left no time; there is none any more. `noise_us`
    is how much `sequential` differs from itself between two calls of one round. Where
    `signalled` was in the race, times in `measured` are those of GPU and host together.
    """

    FILE: ClassVar = "{0.pattern}_{0.M}x{0.N}x{0.K}_{0.layout}_{0.dtype}_tp{0.world_size}"

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
        return json.dumps(dataclasses.asdict(self, dict_factory=_written))

    def why_not(self) -> str | None:
        """Why its plan is none for its problem, or None."""
        if self.problem.M < 1:
            return f"M {self.problem.M} given, 1 or more expected"
        return registry.why_not(self.problem, self.plan)


def _written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    return own_fields(given) if "strategy" in given else given


def decode(kind: Any, raw: Any, where: str) -> Any:
    """`raw` as the type `kind`, each field of its type; `ValueError` says what is not."""
    if get_origin(kind) is tuple and isinstance(raw, (list, tuple)):
        return tuple(decode(get_args(kind)[0], item, f"{where}[]") for item in raw)
    if dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        return _decode_fields(kind, raw, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(raw)
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:
        raise ValueError(f"{where}: {raw!r} given, {kind.__name__} expected")
    return raw


@cache  # evaluating annotations was most of what reading entries took
def _fields_of(kind: Any) -> tuple[dict[str, Any], dict[str, bool]]:
    """The type of each field, and whether it has to be given."""
    needed = {one.name: one.default is dataclasses.MISSING for one in dataclasses.fields(kind)}
    return get_type_hints(kind), needed


def _decode_fields(kind: Any, raw: dict[str, Any], where: str) -> Any:
    hints, fields = _fields_of(kind)
    if missing := {name for name, needed in fields.items() if needed} - raw.keys():
        raise ValueError(f"{where}: fields {sorted(missing)} expected")
    if unknown := raw.keys() - fields.keys():
        raise ValueError(f"{where}: fields {sorted(unknown)}, which this version does not know")
    return kind(**{name: decode(hints[name], raw[name], f"{where}.{name}") for name in raw})
