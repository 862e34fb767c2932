"""Merged values made into arms, as far as they can be, with all that is wrong on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from flux_megatron.config_files import flat
from flux_megatron.launch import rules, schema
from flux_megatron.launch.errors import ErrorDetail
from flux_megatron.launch.inheritance import Value, covers
from flux_megatron.launch.schema import Head
from flux_megatron.launch.workload import Arm, Workload

NAMES = ("model.name", "cluster.name")  # need no source
# Where a file leaves these out there is nothing to explain.
OPTIONAL = ("cluster.health", "cluster.environment", "model.moe", "parallel.ep")


class ArmBuilder:
    """`arms` holds those that could be built, `errors` all that is wrong, memory aside."""

    def __init__(self, values: Mapping[str, Value], file: str) -> None:
        self.values, self.file = values, file
        self.errors = [*schema.unknown_keys(values)]
        head = {key: v for key, v in values.items() if key.split(".")[0] in schema.HEAD}
        self.head: Head | None = self._build(Head, head, "")
        self.arms: dict[Arm, Workload] = {}
        given = [arm for arm in schema.ARMS if self._has(f"arms.{arm}")]
        for arm in given:
            self._add(arm)
        if not given:
            rule = f"none given, some of {[*schema.ARMS]} expected, as `flux: {{}}`"
            self.errors.append(ErrorDetail(file, "arms", rule))
        if self.head is not None:
            for arm, workload in self.arms.items():
                self._add_error(arm, rules.of_megatron(self.head, self.arguments(arm)))
                self._add_error(arm, rules.broken(workload, self.head))

    def check_memory(self) -> None:
        """Call it where there are no errors yet."""
        for arm, workload in self.arms.items():
            self._add_error(arm, rules.too_large(workload))

    def arguments(self, arm: Arm) -> list[str]:
        """Megatron's that the file gives, for all arms and for this one."""
        own = self.values.get(f"arms.{arm}.arguments")
        return [*(self.head.arguments if self.head else []), *(own.value if own else [])]

    def scalars(self) -> list[str]:
        """The keys of all scalars, those that have their default too."""
        given = (key for key, value in self.values.items() if value.value != {})
        found = dict.fromkeys(given)
        for workload in self.arms.values():
            sections = {name: getattr(workload, name) for name in schema.SECTIONS}
            found |= dict.fromkeys(flat({n: dataclasses.asdict(s) for n, s in sections.items()}))
        return [key for key in found if key not in NAMES and not self._left_out(key)]

    def _left_out(self, key: str) -> bool:
        return key not in self.values and any(covers(one, key) for one in OPTIONAL)

    def _add(self, arm: Arm) -> None:
        """Build the arm: its own `parallel` and `training` lie upon those of all."""
        sections: dict[str, Any] = {}
        for section, kind in schema.SECTIONS.items():
            values = self._below(section) | self._below(f"arms.{arm}.{section}")
            sections[section] = self._build(kind, values, section)
        if self._arguments_are_texts(arm) and None not in sections.values():
            self.arms[arm] = Workload(**sections, arm=arm)

    def _build(self, kind: Any, values: Mapping[str, Value], section: str) -> Any:
        built, errors = schema.build(kind, values, section, self.file)
        self.errors += errors
        return built

    def _arguments_are_texts(self, arm: Arm) -> bool:
        own = self.values.get(f"arms.{arm}.arguments")
        if not own or (isinstance(own.value, list) and all(isinstance(a, str) for a in own.value)):
            return True
        rule = f"a list of texts expected, {own.value!r} given"
        self.errors.append(ErrorDetail(own.file, own.key, rule))
        return False

    def _add_error(self, arm: Arm, broken: Iterable[rules.Rule]) -> None:
        for key, rule in broken:
            at = self.values.get(f"arms.{arm}.{key}") or self.values.get(key)
            where = (at.file, at.key) if at else (self.file, key)
            self.errors.append(ErrorDetail(*where, rule))

    def _has(self, section: str) -> bool:
        return any(covers(section, key) for key in self.values)

    def _below(self, section: str) -> dict[str, Value]:
        """Values of a section by their names in it."""
        found = {}
        for key, value in self.values.items():
            if key.startswith(f"{section}."):
                found[key.removeprefix(f"{section}.")] = value
            elif key == section and value.value != {}:
                rule = f"a mapping expected, {value.value!r} given"
                self.errors.append(ErrorDetail(value.file, key, rule))
        return found
