"""YAML files and their bases, merged into flat values of which each knows who set it and why.

A mapping is merged key by key; a list or a scalar replaces what was there. `model: NAME` and
`cluster: NAME` take the whole of configs/models/NAME.yaml or configs/clusters/NAME.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flux_megatron import config_files
from flux_megatron.config_files import configs, flat
from flux_megatron.launch.errors import ErrorDetail, ExperimentError

# sections that a file may take whole by name, and the folders of those that we ship
SHIPPED = {"model": "models", "cluster": "clusters"}
BY_CALLER = "set by the caller"


@dataclass(frozen=True)
class Value:
    """The value of `key` in `file`. Later files of a chain have a higher `order`."""

    key: str
    value: Any
    file: str
    order: int = 0


@dataclass(frozen=True)
class Source:
    """Why `key` and all below it have their values."""

    key: str
    kind: Literal["stated", "assumed"]
    text: str
    file: str
    order: int


def covers(prefix: str, key: str) -> bool:
    return f"{key}.".startswith(f"{prefix}.")


def put(values: dict[str, Value], name: str, value: Value) -> None:
    """Add `value` in place of what stood under `name` or, where a mapping is new, above it."""
    for old in [*values]:
        below = covers(name, old) and value.value != {}
        above = covers(old, name) and values[old].value != {}
        if old != name and (below or above):
            del values[old]
    values[name] = value


def shown(file: Path) -> str:
    """How messages name a file: those we ship from `configs/` on."""
    root = configs().parent
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


class Merged:
    """One experiment: `values`, `sources` and `sweep` by dotted key; an empty mapping is a value
    too. `errors` collects what need not stop the reading.
    """

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.sources: dict[str, Source] = {}
        self.sweep: dict[str, Value] = {}
        self.paper: dict[str, Any] = {}
        self.errors: list[ErrorDetail] = []
        self._order = 0

    def read(self, file: Path, section: str = "", above: tuple[Path, ...] = ()) -> None:
        """Put `file` upon its bases, as one `section` or as the whole. `ExperimentError` where one
        is absent, no YAML, or in a cycle.
        """
        file = file.resolve()
        if file in above:
            chain = " -> ".join(shown(f) for f in (*above, file))
            raise _stop(above[-1], "base", f"inherits from itself: {chain}")
        try:
            raw = config_files.read(file)
        except ValueError as error:
            raise _stop(file, "", str(error)) from None
        base = raw.pop("base", None)
        if isinstance(base, str):
            self.read(file.parent / base, section, (*above, file))
        elif base is not None:
            self._error(shown(file), "base", f"{base!r} given, the path of a file expected")
        self._apply(raw, shown(file), file.parent, section)

    def override(self, overrides: Mapping[str, Any]) -> None:
        """Put dotted `overrides` upon all, as the caller's assumptions."""
        self._apply(dict(overrides), "--set", Path())
        for value in [*self.values.values()]:
            if value.order == self._order:
                self._explain(value.key, "assumed", BY_CALLER, "--set")

    def _apply(self, raw: dict[str, Any], file: str, folder: Path, section: str = "") -> None:
        if not section:
            for part in SHIPPED:
                if isinstance(raw.get(part), str):
                    self._take(part, raw.pop(part), file, folder)
        self._order += 1
        prefix = f"{section}." if section else ""
        for kind in ("stated", "assumed"):
            for keys, text in self._mapping(raw, kind, file).items():
                for key in str(keys).split():
                    self._explain(prefix + key, kind, text, file)
        for key, alternatives in self._mapping(raw, "sweep", file).items():
            self.sweep[prefix + key] = Value(prefix + key, alternatives, file)
        self.paper |= self._mapping(raw, "paper", file)
        for key, value in flat(raw, prefix).items():
            put(self.values, key, Value(key, value, file, self._order))

    def _take(self, section: str, name: str, file: str, folder: Path) -> None:
        """The section becomes that of another file, and nothing of it remains."""
        found = folder / name
        if not name.endswith(".yaml"):
            found = configs() / SHIPPED[section] / f"{name}.yaml"
            known = sorted(one.stem for one in found.parent.glob("*.yaml"))
            if name not in known:
                rule = f"{name!r} given, one of {known} or a file expected"
                self._error(file, section, rule)
                return
        self.values = {k: v for k, v in self.values.items() if not covers(section, k)}
        self.sources = {k: s for k, s in self.sources.items() if not covers(section, k)}
        self.read(found, section)
        key = f"{section}.name"
        self.values[key] = Value(key, found.stem, file, self._order)

    def _mapping(self, raw: dict[str, Any], key: str, file: str) -> dict[str, Any]:
        found = raw.pop(key, {})
        if isinstance(found, dict):
            return found
        self._error(file, key, f"a mapping expected, {found!r} given")
        return {}

    def _explain(self, key: str, kind: Any, text: Any, file: str) -> None:
        if not isinstance(text, str) or not text.strip():
            rule = "expected where the value is from, or why it is"
            self._error(file, f"{kind}.{key}", rule)
            return
        known = self.sources.get(key)
        if known and known.order == self._order and known.kind != kind:
            self._error(file, key, "both stated and assumed")
        self.sources[key] = Source(key, kind, text.strip(), file, self._order)

    def _error(self, file: str, key: str, rule: str) -> None:
        self.errors.append(ErrorDetail(file, key, rule))


def _stop(file: Path, key: str, rule: str) -> ExperimentError:
    return ExperimentError([ErrorDetail(shown(file), key, rule)])
