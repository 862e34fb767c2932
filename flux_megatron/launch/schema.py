"""From values to dataclasses, by pydantic: keys and types, with the nearest name for a typo."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from flux_megatron.config_files import nested
from flux_megatron.launch.errors import ErrorDetail
from flux_megatron.launch.inheritance import Value, covers

Program = Literal["pretrain_gpt", "train"]
UNKNOWN = "unexpected_keyword_argument"  # pydantic's name for an unknown key of a dataclass
T = TypeVar("T")

# As strict as JSON: no number from a text, no integer from a boolean. All within has it too.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class OfArm:
    """What an arm has of its own: its sections lie upon those of all arms."""

    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Arms:
    megatron: OfArm = OfArm()
    te: OfArm = OfArm()
    flux: OfArm = OfArm()


@dataclass(frozen=True)
class File:
    """An experiment as it is written; what its sections hold is checked for each arm."""

    program: Program
    megatron_lm: str
    model: dict[str, Any]
    cluster: dict[str, Any]
    parallel: dict[str, Any]
    training: dict[str, Any]
    arms: Arms = Arms()
    arguments: list[str] = field(default_factory=list)
    tp_across_nodes: bool = False


def build(
    kind: Callable[..., T], values: Mapping[str, Value], file: str
) -> tuple[T | None, list[ErrorDetail]]:
    """A `kind` from `values` by their dotted names in it, or None; and all that is wrong.

    Unknown keys are reported and left out. `file` is named where no value is.
    """
    tree = nested({name: value.value for name, value in values.items()})
    errors: list[ErrorDetail] = []
    while True:
        try:
            return _adapter(kind).validate_json(json.dumps(tree, default=str)), errors
        except ValidationError as error:
            items = error.errors()
        errors += [_error(item, kind, values, file) for item in items]
        if any(item["type"] != UNKNOWN for item in items):
            return None, errors
        for item in items:
            _drop(tree, *item["loc"])


def said(error: ValidationError) -> str:
    """All of it in one line."""
    items = ((".".join(map(str, item["loc"])), _rule(item)) for item in error.errors())
    return "; ".join(": ".join(filter(None, item)) for item in items)


def _rule(item: Any) -> str:
    text = item["msg"].replace("an object", "a mapping")  # as YAML calls it
    if isinstance(item["input"], dict) or item["type"] in ("json_invalid", "value_error"):
        return str(text)
    return f"{text}, {item['input']!r} given"


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(with_config(STRICT)(kind))


def _drop(tree: Any, *keys: str | int) -> None:
    for key in keys[:-1]:
        tree = tree[key]
    del tree[keys[-1]]


def _error(item: Any, kind: Any, values: Mapping[str, Value], file: str) -> ErrorDetail:
    """It names the value itself, what lies below it, or what covers it."""
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        section = name.partition(".")[0]
        files = {value.file for key, value in values.items() if covers(section, key)}
        return ErrorDetail(files.pop() if len(files) == 1 else file, name, "missing")
    rule = _unknown(kind, *item["loc"]) if item["type"] == UNKNOWN else _rule(item)
    near = [given for given in values if covers(given, name) or covers(name, given)]
    if not near:
        return ErrorDetail(file, name, rule)
    given = max(near, key=len)
    return ErrorDetail(values[given].file, values[given].key.removesuffix(given[len(name) :]), rule)


def _unknown(kind: Any, *names: str) -> str:
    for name in names[:-1]:
        hint = get_type_hints(kind)[name]
        kind = next(one for one in (hint, *get_args(hint)) if is_dataclass(one))
    known = sorted(get_type_hints(kind))
    near = difflib.get_close_matches(names[-1], known, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; known: {known}"
