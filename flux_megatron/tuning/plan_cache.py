"""Measured plans on disk, with their provenance: the user's cache, then the entries we ship.

A file holds any number of entries. The user's cache has one file for each key, named after it and
replaced in one step, so that jobs that write at once lose nothing. What cannot be read is a miss
with a reason, never an error; how an entry is read stands in `plan_entry.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Generic

from flux_megatron.problem import Problem
from flux_megatron.tuning.environment import PACKAGE, Environment
from flux_megatron.tuning.plan_entry import FORMAT, AnyEntry, E, Entry, read_entry


class Entries(Generic[E]):
    """The entries of a kind in some folders, for one machine; earlier folders come first.

    `where` is the environment of this process for calls of a strategy.
    """

    def __init__(
        self, kind: type[E], folders: Iterable[Path], where: Callable[[str], Environment]
    ) -> None:
        self.where = where
        self.environment = where("sequential")
        self.entries: list[E] = []
        self.left_out: list[str] = []
        for folder in folders:
            entries, left_out = read_folder(kind, folder / slug(self.environment.gpu) / kind.FOLDER)
            self.entries += entries
            self.left_out += left_out

    def find(self, problem: object) -> E | None:
        """The entry whose problem and environment are equal in every field."""
        return next((e for e in self.entries if e.problem == problem and self.is_here(e)), None)

    def is_here(self, entry: E) -> bool:
        """Whether it was measured in this environment, with what its plan would run today."""
        return entry.environment == self.where(entry.plan.strategy)


class PlanCache(Entries[Entry]):
    """The entries of linear layers."""

    def __init__(self, folders: Iterable[Path], where: Callable[[str], Environment]) -> None:
        super().__init__(Entry, folders, where)

    def of_kind(self, kind: Problem, here: bool) -> list[Entry]:
        """Entries of the problem whatever its M, on this GPU and link: those measured in this
        environment, then, unless only they are wanted (`here`), those with other software.
        """
        found = [
            e for e in self.entries
            if replace(e.problem, M=0) == kind
            and _machine(e.environment) == _machine(self.environment)
        ]  # fmt: skip
        found.sort(key=lambda one: not self.is_here(one))
        return [one for one in found if self.is_here(one)] if here else found


def _machine(environment: Environment) -> tuple[str, str]:
    return environment.gpu, environment.link


def slug(gpu: str) -> str:
    """The folder of a GPU's entries: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def shipped() -> Path:
    """The folder of the entries we ship: inside an installed package, else in the checkout."""
    inside = PACKAGE / "configs" / "tuned"
    return inside if inside.is_dir() else PACKAGE.parent / "configs" / "tuned"


def read_folder(kind: type[E], folder: Path) -> tuple[list[E], list[str]]:
    """All entries of the folder's JSON files, and what was left out or ignored."""
    entries: list[E] = []
    left_out: list[str] = []
    for file in sorted(folder.glob("*.json")):
        found, reasons = read_file(kind, file)
        entries += found
        left_out += [f"{file}{reason}" for reason in reasons]
    return entries, left_out


def read_file(kind: type[E], file: Path) -> tuple[list[E], list[str]]:
    """Its entries, and what of it was left out or ignored."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return [], [f": left out, {error}"]
    written_in = content.get("format") if isinstance(content, dict) else None
    if (
        type(written_in) is not int
        or written_in < 1
        or not isinstance(content.get("entries"), list)
    ):
        return [], [": left out, a format and a list of entries expected"]
    if written_in > FORMAT:
        return [], [f": left out, format {written_in}; this version reads 1 to {FORMAT}"]
    entries: list[E] = []
    left_out: list[str] = []
    notes: dict[str, None] = {}  # once a file
    for number, raw in enumerate(content["entries"]):
        try:
            entry, ignored = read_entry(kind, raw, written_in)
        except ValueError as error:  # noqa: PERF203, the others of the file may be good
            left_out.append(f", entry {number}: left out, {error}")
        else:
            entries.append(entry)
            notes |= dict.fromkeys(f": {note}" for note in ignored)
    return entries, [*left_out, *notes]


def write_file(file: Path, entries: Iterable[AnyEntry]) -> None:
    """Replace `file` by the entries, one a line; readers see the old file or the new one."""
    lines = ",\n".join(entry.dumps() for entry in entries)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=f".{file.stem}.", suffix=".partial", delete=False
    ) as partial:
        partial.write(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
    os.chmod(partial.name, 0o644)  # temporary files are private
    os.replace(partial.name, file)


def store(folder: Path, entry: AnyEntry) -> Path:
    """Write the entry to the file of its key in the user's cache. The sources are no part of the
    file's name: they depend on the plan, and what is measured again takes the place of what was.
    """
    name, where = entry.FILE.format(entry.problem), replace(entry.environment, sources="")
    key = json.dumps([dataclasses.asdict(entry.problem), dataclasses.asdict(where)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    file = folder / slug(where.gpu) / entry.FOLDER / f"{name}_{digest}.json"
    write_file(file, [entry])
    return file
