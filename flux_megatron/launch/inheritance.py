"""YAML files and their bases, merged into flat values of which each knows who set it and why.

A mapping is merged key by key; a list or a scalar replaces what was there. `model: NAME` and
`cluster: NAME` take the whole of configs/models/NAME.yaml or configs/clusters/NAME.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    order: int


@dataclass(frozen=True)
class Source:
    """Why `key` and all below it have their values."""

    key: str
    kind: Literal["stated", "assumed"]
    text: str
    file: str
    order: int


@dataclass
class Merged:
    """`values` by dotted key; an empty mapping is a value too."""

    values: dict[str, Value] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    sweep: dict[str, Value] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)

    def put(self, value: Value) -> None:
        """Add `value`, in place of what stood under its key or, where a mapping is new, above."""
        for key in list(self.values):
            replaced = is_below(key, value.key) and value.value != {}
            if replaced or (is_below(value.key, key) and self.values[key].value != {}):
                del self.values[key]
        self.values[value.key] = value

    def replace_section(self, section: str, other: Merged) -> None:
        """`other` becomes this section, of which nothing else remains."""
        self.values = {k: v for k, v in self.values.items() if not covers(section, k)}
        self.sources = {k: s for k, s in self.sources.items() if not covers(section, k)}
        for old in other.values.values():
            key = f"{section}.{old.key}"
            self.values[key] = Value(key, old.value, old.file, old.order)
        for source in other.sources.values():
            key = f"{section}.{source.key}"
            self.sources[key] = Source(key, source.kind, source.text, source.file, source.order)


def is_below(key: str, prefix: str) -> bool:
    return key.startswith(prefix + ".")


def covers(prefix: str, key: str) -> bool:
    return key == prefix or is_below(key, prefix)


def shown(file: Path) -> str:
    """How messages name a file: those we ship from `configs/` on."""
    root = configs().parent
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


class Reader:
    """Reads one experiment; `errors` collects what need not stop it."""

    def __init__(self) -> None:
        self.errors: list[ErrorDetail] = []
        self._order = 0

    def read(self, file: Path, whole: Mapping[str, str], above: tuple[Path, ...] = ()) -> Merged:
        """`file` upon its bases. `ExperimentError` where one is absent, no YAML, or in a cycle."""
        file = file.resolve()
        if file in above:
            chain = " -> ".join(shown(f) for f in (*above, file))
            raise _stop(above[-1], "base", f"inherits from itself: {chain}")
        raw = parse(file)
        base = raw.pop("base", None)
        merged = Merged()
        if isinstance(base, str):
            merged = self.read(file.parent / base, whole, (*above, file))
        elif base is not None:
            self._add_error(shown(file), "base", f"{base!r} given, the path of a file expected")
        self._apply(merged, raw, shown(file), whole, file.parent)
        return merged

    def override(self, merged: Merged, overrides: Mapping[str, Any]) -> None:
        """Put dotted `overrides` upon `merged`, as the caller's assumptions."""
        self._apply(merged, dict(overrides), "--set", SHIPPED, Path())
        for value in list(merged.values.values()):
            if value.order == self._order:
                self._source(merged, value.key, "assumed", BY_CALLER, "--set")

    def _apply(
        self, merged: Merged, raw: dict[str, Any], file: str, whole: Mapping[str, str], folder: Path
    ) -> None:
        names = {key: raw.pop(key) for key in whole if isinstance(raw.get(key), str)}
        for section, name in names.items():
            found = folder / name
            if not name.endswith(".yaml"):
                shipped = configs() / whole[section]
                known = sorted(file.stem for file in shipped.glob("*.yaml"))
                if name not in known:
                    rule = f"{name!r} given, one of {known} or a file expected"
                    self._add_error(file, section, rule)
                    continue
                found = shipped / f"{name}.yaml"
            merged.replace_section(section, self.read(found, {}))
            merged.put(Value(f"{section}.name", Path(name).stem, file, self._order))
        self._order += 1
        for kind in ("stated", "assumed"):
            for keys, text in self._mapping(raw, kind, file).items():
                for key in str(keys).split():
                    self._source(merged, key, kind, text, file)
        for key, alternatives in self._mapping(raw, "sweep", file).items():
            merged.sweep[key] = Value(key, alternatives, file, self._order)
        merged.paper |= self._mapping(raw, "paper", file)
        for key, value in flat(raw).items():
            merged.put(Value(key, value, file, self._order))

    def _mapping(self, raw: dict[str, Any], key: str, file: str) -> dict[str, Any]:
        found = raw.pop(key, {})
        if isinstance(found, dict):
            return found
        self._add_error(file, key, f"a mapping expected, {found!r} given")
        return {}

    def _source(self, merged: Merged, key: str, kind: Any, text: Any, file: str) -> None:
        if not isinstance(text, str) or not text.strip():
            self._add_error(file, f"{kind}.{key}", "expected where the value is from, or why it is")
            return
        known = merged.sources.get(key)
        if known and known.order == self._order and known.kind != kind:
            self._add_error(file, key, "both stated and assumed")
        merged.sources[key] = Source(key, kind, text.strip(), file, self._order)

    def _add_error(self, file: str, key: str, rule: str) -> None:
        self.errors.append(ErrorDetail(file, key, rule))


def parse(file: Path) -> dict[str, Any]:
    """The mapping that a file holds. `ExperimentError` for all else."""
    try:
        return config_files.read(file)
    except ValueError as error:
        raise _stop(file, "", str(error)) from None


def _stop(file: Path, key: str, rule: str) -> ExperimentError:
    return ExperimentError([ErrorDetail(shown(file), key, rule)])
