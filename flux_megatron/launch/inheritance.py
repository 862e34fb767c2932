"""YAML files and their bases, merged into one tree, and why each of its values is what it is.

A mapping is merged key by key; a list or a scalar replaces what was there. `model: NAME` and
`cluster: NAME` take the whole of configs/models/NAME.yaml or configs/clusters/NAME.yaml. A file
explains, by `stated` and `assumed`, what it sets and what nothing has explained before; of keys
that cover a value the longest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flux_megatron import config_files, shipped
from flux_megatron.config_files import flat, merge
from flux_megatron.launch.errors import ExperimentError, Rule

# sections that a file may take whole by name, and the folders of those that we ship
SHIPPED = {"model": "models", "cluster": "clusters"}
NAMES = ("model.name", "cluster.name")  # which are those of the files
BY_CALLER = "set by the caller"
NO_VALUE = "there is no such value"
Tree = dict[str, Any]


def covers(prefix: str, key: str) -> bool:
    return f"{key}.".startswith(f"{prefix}.")


class Merged:
    """A file upon its bases, with dotted `overrides` upon all. `why` has (kind, text) for each
    scalar that is explained, by its dotted key. `wrong` collects what need not stop the reading.

    `ExperimentError` where a file is absent, no YAML, or in a cycle.
    """

    def __init__(self, file: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.tree: Tree = {}
        self.why: dict[str, tuple[str, str]] = {}
        self.sweep: Tree = {}
        self.paper: Tree = {}
        self.wrong: list[Rule] = []
        self._read(file)
        if overrides:
            self._apply({**overrides, "assumed": dict.fromkeys(overrides, BY_CALLER)}, Path())

    def reasons(self) -> Tree:
        """`stated`, `assumed`, `sweep` and `paper` of an experiment."""
        of: Tree = {"stated": {}, "assumed": {}}
        for key, (kind, text) in self.why.items():
            of[kind][key] = text
        return {**of, "sweep": self.sweep, "paper": self.paper}

    def unexplained(self) -> list[Rule]:
        """Values without a reason, and what may not be swept: only what is assumed may."""
        keys = [key for key, value in flat(self.tree).items() if value != {} and key not in NAMES]
        found = [(key, "neither stated nor assumed here") for key in keys if key not in self.why]
        for key, values in self.sweep.items():
            if key not in keys:
                found.append((f"sweep.{key}", NO_VALUE))
            elif self.why.get(key, ("",))[0] == "stated":
                found.append((f"sweep.{key}", "stated: only what is assumed is swept"))
            if not isinstance(values, list) or not values:
                found.append((f"sweep.{key}", f"a list expected, {values!r} given"))
        return found

    def _read(self, file: Path, section: str = "", above: tuple[Path, ...] = ()) -> None:
        """Apply the file's bases and then the file, as one `section` or as the whole."""
        try:
            file = file.resolve()
            raw = config_files.read(file)
        except ValueError as error:
            raise ExperimentError(str(file), [("", str(error))]) from None
        if file in above:
            chain = " -> ".join(map(str, (*above, file)))
            raise ExperimentError(str(file), [("base", f"inherits from itself: {chain}")])
        base = raw.pop("base", None)
        if isinstance(base, str):
            self._read(file.parent / base, section, (*above, file))
        elif base is not None:
            self.wrong.append(("base", f"{base!r} given, the path of a file expected"))
        self._apply(raw, file.parent, section)

    def _apply(self, raw: Tree, folder: Path, section: str = "") -> None:
        for part in () if section else SHIPPED:
            if isinstance(raw.get(part), str):
                self._take(part, raw.pop(part), folder)
        prefix = f"{section}." if section else ""
        reasons: dict[str, tuple[str, str]] = {}
        for kind in ("stated", "assumed"):
            for keys, text in self._mapping(raw, kind).items():
                for key in (prefix + one for one in str(keys).split()):
                    if not isinstance(text, str) or not text.strip():
                        rule = "expected where the value is from, or why it is"
                        self.wrong.append((f"{kind}.{key}", rule))
                    elif key in reasons:
                        self.wrong.append((key, "both stated and assumed"))
                    reasons[key] = kind, str(text).strip()
        self.sweep |= {f"{prefix}{key}": one for key, one in self._mapping(raw, "sweep").items()}
        self.paper |= self._mapping(raw, "paper")
        merge(self.tree, {section: raw} if section else raw)
        own, values = flat(raw, prefix), flat(self.tree)
        self.why = {key: why for key, why in self.why.items() if key in values.keys() - own.keys()}
        for key in [key for key in values if key not in self.why]:
            if covering := [reason for reason in reasons if covers(reason, key)]:
                self.why[key] = reasons[max(covering, key=len)]
        for reason, (kind, _) in reasons.items():
            if not any(covers(reason, key) for key in values):
                self.wrong.append((f"{kind}.{reason}", NO_VALUE))

    def _take(self, section: str, name: str, folder: Path) -> None:
        """The section becomes that of another file, and nothing of it remains."""
        file = folder / name
        if not name.endswith(".yaml"):
            file = shipped.folder("configs") / SHIPPED[section] / f"{name}.yaml"
            known = sorted(one.stem for one in file.parent.glob("*.yaml"))
            if name not in known:
                rule = f"{name!r} given, one of {known} or a file expected"
                self.wrong.append((section, rule))
                return
        self.tree.pop(section, None)
        self._read(file, section)
        self.tree[section]["name"] = file.stem

    def _mapping(self, raw: Tree, key: str) -> Tree:
        found = raw.pop(key, {})
        if isinstance(found, dict):
            return found
        self.wrong.append((key, f"a mapping expected, {found!r} given"))
        return {}
