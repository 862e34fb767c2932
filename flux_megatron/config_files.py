"""Configurations as files: strict YAML, values by dotted keys, and how two of them differ.

YAML without three surprises of PyYAML's: 1e-4 is a number, 12:00:00 is a text and
not 43200, and a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flux_megatron.errors import BadInput


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.deep_construct = True  # refuses an alias within what it names: a tree without an end

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"given twice: {', '.join(sorted(twice))}", node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    [*"-+0123456789"],
)
for _resolvers in (_Loader.yaml_implicit_resolvers[first] for first in "-+0123456789"):
    _resolvers.insert(0, ("tag:yaml.org,2002:str", re.compile(r"[-+]?[0-9_]+(:[0-9]+)+(\.|$)")))


def read(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, empty for an empty file.

    `ValueError` for all else, without the file's name.
    """
    try:
        raw = yaml.load(file.read_text("utf-8"), _Loader)
    except OSError as error:
        raise ValueError(str(error.strerror)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not a text file: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ValueError(f"a mapping expected, {type(raw).__name__} given")
    return raw


def overrides(texts: Iterable[str], example: str) -> dict[str, Any]:
    """What `--set` gives: ["a.b=2"] -> {"a.b": 2}, the values read as YAML. `BadInput`, with an
    `example`.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise BadInput(f"--set: {text!r} given, key=value expected, such as {example}")
        try:
            found[key] = yaml.load(value, _Loader)
        except (yaml.YAMLError, ValueError):  # ValueError: a day that no month has
            raise BadInput(f"--set: {key}: not YAML: {value!r}") from None
    return found


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`other` upon `tree`; dotted keys are those of mappings."""
    for name, value in other.items():
        first, _, rest = str(name).partition(".")
        value = {rest: value} if rest else value
        old = tree.get(first)
        new = isinstance(value, dict)
        tree[first] = merge(dict(old) if isinstance(old, dict) else {}, value) if new else value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; empty mappings stay."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], but: tuple[str, ...]) -> str:
    """As "a.b: 1 -> 2; a.c: ...", or nothing. Keys that end in one of `but` may differ."""
    before, after = flat(old), flat(new)
    keys = (key for key in sorted(before | after) if not key.endswith(but))
    return "; ".join(
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in keys
        if before.get(key) != after.get(key)
    )
