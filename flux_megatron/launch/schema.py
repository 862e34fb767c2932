"""From a tree to dataclasses, by pydantic: keys and types, with the nearest name for a typo."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from flux_megatron.config_files import flat
from flux_megatron.launch.errors import Rule
from flux_megatron.launch.workload import Arm

Program = Literal["pretrain_gpt", "train"]
T = TypeVar("T")
# All else is said by the file, also where a dataclass has a default.
OPTIONAL = (
    "arms", "arguments", "model.experts", "cluster.health", "cluster.environment", "training.fp8",
)  # fmt: skip
# As strict as JSON: no number from a text, no integer from a boolean. All within has it too.
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class OfArm:
    """What an arm has of its own: its sections lie upon those of all arms."""

    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class File:
    """An experiment as it is written; what its sections hold is checked for each arm."""

    program: Program
    megatron_lm: str
    model: dict[str, Any]
    cluster: dict[str, Any]
    parallel: dict[str, Any]
    training: dict[str, Any]
    arms: dict[Arm, OfArm]
    arguments: list[str] = field(default_factory=list)


def build(kind: Callable[..., T], tree: Mapping[str, Any]) -> tuple[T | None, list[Rule]]:
    """A `kind` from a tree, or None; and all that is wrong. Unknown keys are left out."""
    wrong, built = [*_unknown(kind, tree)], None
    try:
        built = _adapter(kind).validate_json(json.dumps(tree, default=str))
        left_out = flat(asdict(built)).keys() - flat(tree).keys()
        wrong += [(key, "missing") for key in left_out if not key.startswith(OPTIONAL)]
    except ValidationError as error:
        wrong += broken(error)
    return built, wrong


def broken(error: ValidationError) -> Iterator[Rule]:
    """What pydantic has found, by dotted key."""
    for item in error.errors():
        text = item["msg"].replace("an object", "a mapping")  # as YAML calls it
        text = text.removeprefix("Value error, ")
        if item["type"] == "missing":
            text = "missing"
        elif not isinstance(item["input"], dict) and item["type"] != "value_error":
            text += f", {item['input']!r} given"
        yield ".".join(str(one) for one in item["loc"] if one != "[key]"), text


def said(error: ValidationError) -> str:
    """All of it in one line."""
    return "; ".join(": ".join(filter(None, one)) for one in broken(error))


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(with_config(STRICT)(kind))


def _unknown(kind: Any, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Rule]:
    """The keys in `tree` of no field of the dataclass `kind`, nor of those within."""
    hints = get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            text = f"did you mean {near[0]!r}?" if near else f"known: {sorted(hints)}"
            yield prefix + key, f"unknown key; {text}"
        elif isinstance(value, dict):
            for one in filter(is_dataclass, (hints[key], *get_args(hints[key]))):
                named = value if get_origin(hints[key]) is dict else {"": value}
                for name, inner in named.items():
                    if isinstance(inner, dict):
                        yield from _unknown(
                            one, inner, ".".join((prefix + key, name)).strip(".") + "."
                        )
