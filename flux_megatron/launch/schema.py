"""From values to `launch.workload`: keys and types, with the nearest name for a typo."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from flux_megatron.config_files import nested
from flux_megatron.launch.errors import ErrorDetail
from flux_megatron.launch.inheritance import Value, covers
from flux_megatron.launch.workload import (
    Arm,
    Cluster,
    Health,
    Link,
    Model,
    Moe,
    Nics,
    Parallel,
    Training,
)

Program = Literal["pretrain_gpt", "train"]

# As strict as JSON: no number from a text, no integer from a boolean, no unknown key.
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def make_strict(*sections: type) -> None:
    """Dataclasses that `build` may build."""
    for section in sections:
        with_config(_STRICT)(section)


make_strict(Model, Moe, Link, Nics, Health, Cluster, Parallel, Training)


@dataclasses.dataclass(frozen=True)
class Head:
    """What an experiment has beside its sections."""

    program: Program
    megatron_lm: str
    arguments: list[str] = dataclasses.field(default_factory=list)
    tp_across_nodes: bool = False


make_strict(Head)

SECTIONS = {"model": Model, "cluster": Cluster, "parallel": Parallel, "training": Training}
ARMS: tuple[Arm, ...] = get_args(Arm)
OF_AN_ARM = ("parallel", "training", "arguments")
HEAD = (*get_type_hints(Head),)
TOP = (*SECTIONS, "arms", *HEAD)


def build(
    kind: Any, values: Mapping[str, Value], section: str, file: str
) -> tuple[Any, list[ErrorDetail]]:
    """A `kind` from `values` by their names within it; None, and errors, where that cannot be.

    Unknown keys are reported and left out. `section` and `file` are named where no value is.
    """
    if not values and section:
        return None, [ErrorDetail(file, section, "missing")]
    unknown, errors = [], []
    for name, value in values.items():
        known = names_at(kind, name)
        if known is not None:
            unknown.append(name)
            errors.append(ErrorDetail(value.file, value.key, unknown_key(name, known)))
    kept = {name: value for name, value in values.items() if name not in unknown}
    raw = nested({name: value.value for name, value in kept.items()})
    try:
        built = _adapter(kind).validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        errors += [_detail(item, kept, section, file) for item in error.errors()]
        return None, errors
    return built, errors


_hints = lru_cache(get_type_hints)


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def names_at(kind: Any, dotted: str) -> list[str] | None:
    """The names that could have stood in place of an unknown one in `dotted`; None if all exist."""
    for name in dotted.split("."):
        kind = next((k for k in (kind, *get_args(kind)) if dataclasses.is_dataclass(k)), None)
        if kind is None:
            return None  # a mapping where a scalar belongs: its type is wrong, not its name
        hints = _hints(kind)
        if name not in hints:
            return [*hints]
        kind = hints[name]
    return None


def unknown_key(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name.split(".")[-1], known, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; known: {known}"


def unknown_keys(values: Mapping[str, Value]) -> Iterator[ErrorDetail]:
    """Errors of keys that stand in no section: at the top, and in arms."""
    for key, value in values.items():
        top, *rest = key.split(".")
        if top not in TOP:
            yield ErrorDetail(value.file, key, unknown_key(top, TOP))
        elif top == "arms" and rest and rest[0] not in ARMS:
            yield ErrorDetail(value.file, key, unknown_key(rest[0], ARMS))
        elif top == "arms" and len(rest) > 1 and rest[1] not in OF_AN_ARM:
            yield ErrorDetail(value.file, key, unknown_key(rest[1], OF_AN_ARM))
        elif top == "arms" and len(rest) < 2 and value.value != {}:
            yield ErrorDetail(value.file, key, f"a mapping expected, {value.value!r} given")


def _detail(item: Any, values: Mapping[str, Value], section: str, file: str) -> ErrorDetail:
    name = ".".join(str(part) for part in item["loc"])
    key = f"{section}.{name}".lstrip(".")
    if item["type"] == "missing":
        files = {value.file for value in values.values()}
        return ErrorDetail(files.pop() if len(files) == 1 else file, key, "missing")
    rule = item["msg"]
    if not isinstance(item["input"], dict):
        rule += f", {item['input']!r} given"
    for given, value in values.items():
        if covers(given, name):
            return ErrorDetail(value.file, value.key, rule)
        if covers(name, given):
            return ErrorDetail(value.file, key, rule)
    return ErrorDetail(file, key, rule)
