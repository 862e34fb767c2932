"""One entry of a file of measured plans: what it says, and how it is read.

`FORMAT` rises when a field changes its meaning; `MIGRATIONS` bring older entries up to date. A new
field needs no new format: its default means "as before", so that an entry without it stays true. A
field that this version does not know may be ignored if it says 0, "", false or null, the defaults
of all later fields. If it says more, what bears it is something else: a plan is left out of the
entry, a problem or an environment leaves the whole entry out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from flux_megatron.overlap import registry
from flux_megatron.problem import Plan, Problem
from flux_megatron.tuning.environment import Environment

FORMAT = 4
E = TypeVar("E", bound="AnyEntry")


@dataclass(frozen=True)
class Measured:
    plan: Plan
    median_us: float


@dataclass(frozen=True)
class Failed:
    plan: Plan
    reason: str


@dataclass(frozen=True)
class AnyEntry:
    """The best plan of a problem in an environment, and how it was found.

    `FOLDER`, in that of a GPU, has its files; `FILE` is how they are called after the problem.

    `environment.sources` is the digest of what calls of the best plan's strategy run. `untried`
    counts the plans for which there was no time. `noise_us` is how much `sequential` differs from
    itself between two calls of one round.
    """

    FOLDER: ClassVar[str] = ""
    FILE: ClassVar[str]

    problem: Any
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
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls: type[E], text: str) -> E:
        """`ValueError` says what is not an entry of this version."""
        entry, notes = read_entry(cls, json.loads(text), FORMAT)
        if notes:
            raise ValueError("; ".join(notes))
        return entry


@dataclass(frozen=True)
class Entry(AnyEntry):
    """That of linear layers."""

    FILE = "{0.pattern}_{0.M}x{0.N}x{0.K}_{0.layout}_{0.dtype}_tp{0.world_size}"

    problem: Problem


def read_entry(kind: type[E], raw: Any, written_in: int) -> tuple[E, list[str]]:
    """An entry of a file of the format `written_in`, and what of it was ignored or left out.

    `ValueError` says why nothing of it can be used.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"entry: {raw!r} given, an object expected")
    for migrate in MIGRATIONS[written_in - 1 :]:
        raw = migrate(raw)
    notes: list[str] = []
    raw = _readable_plans(raw, notes)
    entry: E = decode(kind, raw, "entry", notes)
    return entry, [*dict.fromkeys(notes)]


def _to_format_2(raw: dict[str, Any]) -> dict[str, Any]:
    """Digests of format 1 were of all sources at once, and of Python's version: they say so, and
    equal none of format 2.
    """
    where = raw.get("environment")
    if not isinstance(where, dict) or "sources" not in where:
        return raw  # `decode` says so
    return {**raw, "environment": {**where, "sources": f"format 1: {where['sources']}"}}


def _to_format_3(raw: dict[str, Any]) -> dict[str, Any]:
    """`Plan.split_k_shards` was `cut_shards`, in an entry's plan and in those of its lists."""
    plan = raw.get("plan")
    if isinstance(plan, dict) and "cut_shards" in plan:
        plan = {"split_k_shards" if k == "cut_shards" else k: v for k, v in plan.items()}
        raw = {**raw, "plan": plan}
    for name in ("measured", "failed"):
        if isinstance(raw.get(name), list):
            raw = {**raw, name: [_to_format_3(o) if isinstance(o, dict) else o for o in raw[name]]}
    return raw


def _to_format_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Tiles split along K early are gone, and tiles of 320, 192 and 160 columns."""
    raw = dict(raw)
    for name in ("measured", "failed"):
        if isinstance(raw.get(name), list):
            raw[name] = [_without_early(one) for one in raw[name] if not _is_gone(one)]
    if not _is_gone(raw):
        return _without_early(raw)
    if not raw.get("measured"):
        raise ValueError("entry: no plan that this version can run")
    return {**raw, "plan": min(raw["measured"], key=lambda one: one["median_us"])["plan"]}


def _without_early(one: Any) -> Any:
    plan = one.get("plan") if isinstance(one, dict) else None
    if not isinstance(plan, dict):
        return one  # `decode` says what it is
    return {**one, "plan": {k: v for k, v in plan.items() if k != "split_k_shards"}}


def _is_gone(one: Any) -> bool:
    plan = one.get("plan") if isinstance(one, dict) else None
    if not isinstance(plan, dict):
        return False
    tile = plan.get("tile")
    columns = tile.get("block_n") if isinstance(tile, dict) else None
    return bool(plan.get("split_k_shards")) or columns in (320, 192, 160)


MIGRATIONS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    _to_format_2,
    _to_format_3,
    _to_format_4,
]


def _readable_plans(raw: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The entry without the plans that this version cannot run; if the best plan is one of them,
    the fastest of the others takes its place.
    """
    if not all(isinstance(raw.get(name), list) for name in ("measured", "failed")):
        return raw  # `decode` says so
    problem = raw.get("problem")
    pattern = str(problem.get("pattern")) if isinstance(problem, dict) else ""
    raw = dict(raw)
    for name in ("measured", "failed"):
        raw[name] = [one for one in raw[name] if _readable(one, pattern, notes)]
    if not _readable(raw, pattern, notes):
        others = decode(tuple[Measured, ...], raw["measured"], "entry.measured", [])
        if not others:
            raise ValueError("entry: no plan that this version can run")
        raw["plan"] = dataclasses.asdict(min(others, key=lambda one: one.median_us).plan)
    return raw


def _readable(one: Any, pattern: str, notes: list[str]) -> bool:
    """Whether this version has the strategy of its plan, and all that the plan asks for."""
    plan = one.get("plan") if isinstance(one, dict) else None
    if not isinstance(plan, dict):
        return True  # `decode` says what it is
    strategies = next((t for p, t in registry.STRATEGIES.items() if p == pattern), {})
    name = plan.get("strategy")
    if strategies and isinstance(name, str) and name not in strategies:
        notes.append(f"plans of strategy {name!r} are left out: this version has {[*strategies]}")
        return False
    try:
        decode(Plan, plan, "plan", [])
    except _MoreAsked as more:
        notes.append(f"plans with {more}, are left out")
        return False
    except ValueError:
        pass  # `decode` says it for the entry
    return True


class _MoreAsked(ValueError):
    """A field that this version does not know has another value than its default."""


def decode(kind: Any, raw: Any, where: str, notes: list[str]) -> Any:
    """`raw` as the type `kind`, each field of its type; `ValueError` says what is not."""
    if get_origin(kind) is tuple and isinstance(raw, (list, tuple)):
        return tuple(decode(get_args(kind)[0], item, f"{where}[]", notes) for item in raw)
    if dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        return _decode_fields(kind, raw, where, notes)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(raw)
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:
        raise ValueError(f"{where}: {raw!r} given, {kind.__name__} expected")
    return raw


def _decode_fields(kind: Any, raw: dict[str, Any], where: str, notes: list[str]) -> Any:
    hints = get_type_hints(kind)
    needed = {
        one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING
    }  # fmt: skip
    if missing := needed - raw.keys():
        raise ValueError(f"{where}: fields {sorted(missing)} expected")
    for name in sorted(raw.keys() - hints.keys()):
        # more about a measurement is nothing else to run
        told = issubclass(kind, (AnyEntry, Measured, Failed))
        if raw[name] and not told:
            raise _MoreAsked(f"{where}.{name} = {raw[name]!r}, which this version does not know")
        notes.append(f"field {where}.{name} is ignored: this version does not know it")
    known = hints.keys() & raw.keys()
    return kind(
        **{name: decode(hints[name], raw[name], f"{where}.{name}", notes) for name in known}
    )
