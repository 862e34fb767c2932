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
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from flux_megatron import shipped
from flux_megatron.problem import Problem
from flux_megatron.tuning import environment, link
from flux_megatron.tuning.environment import Environment
from flux_megatron.tuning.plan_entry import FORMAT, Entry, decode


class PlanCache:
    """The entries in some folders, for one machine; earlier folders come first."""

    def __init__(self, folders: Iterable[Path], environment: Environment) -> None:
        self.environment = environment
        here = [folder / slug(environment.gpu) for folder in folders]
        self.entries, self.left_out = read_folders(*here)

    def find(self, problem: Problem) -> Entry | None:
        """The entry whose problem and environment are equal in every field."""
        return next((e for e in self.entries if e.problem == problem and self.is_here(e)), None)

    def is_here(self, entry: Entry) -> bool:
        """Whether it was measured in this environment, with what would run today."""
        return entry.environment == self.environment

    def of_kind(self, kind: Problem, here: bool) -> list[Entry]:
        """Entries of the problem whatever its M, on this GPU and link: those measured in this
        environment, then, unless only they are wanted (`here`), those with other software, or where
        a process sees the link that does not here, or the reverse.
        """
        gpu, link_here = self.environment.gpu, link.name(self.environment.link)
        found = [
            e for e in self.entries
            if replace(e.problem, M=0) == kind
            and (e.environment.gpu, link.name(e.environment.link)) == (gpu, link_here)
        ]  # fmt: skip
        found.sort(key=lambda one: not self.is_here(one))
        return [one for one in found if self.is_here(one)] if here else found


@lru_cache(maxsize=8)
def opened(folder: Path, device: torch.device) -> PlanCache:
    """The entries of the user's cache, in `folder`, and those we ship, for this environment; read
    once.
    """
    ours = shipped.folder("configs") / "tuned"
    cache = PlanCache([user_folder(folder), ours], environment.of(device))
    for reason in cache.left_out:
        warnings.warn(f"flux_megatron: measured plans are left out: {reason}", stacklevel=2)
    return cache


def keep(entry: Entry, folder: Path, device: torch.device) -> None:
    """Use the entry from now on, here and in later runs."""
    opened(folder, device).entries.insert(0, entry)
    try:
        store(user_folder(folder), entry)
    except OSError as error:
        warnings.warn(f"flux_megatron: a measured plan is not kept: {error}", stacklevel=2)


def user_folder(folder: Path) -> Path:
    """Where in FLUX_MEGATRON_CACHE measured plans are."""
    return folder / "plans"


def slug(gpu: str) -> str:
    """The folder of a GPU's entries: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def read_folders(*folders: Path) -> tuple[list[Entry], list[str]]:
    """All entries of the folders' JSON files, and what was left out."""
    entries: list[Entry] = []
    left_out: list[str] = []
    for folder in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # a network's file system has many
            left_out.append(f"{folder}: {error}")
            continue
        for file in (folder / name for name in names):
            found, reasons = read_file(file)
            entries += found
            left_out += [f"{file}{reason}" for reason in reasons]
    return entries, left_out


def read_file(file: Path) -> tuple[list[Entry], list[str]]:
    """Its entries, and what of it was left out."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return [], [f": {error}"]
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        return [], [": a format and a list of entries expected"]
    if (written_in := content.get("format")) != FORMAT:
        return [], [f": format {written_in}; this version reads {FORMAT}"]
    entries: list[Entry] = []
    left_out: list[str] = []
    for number, raw in enumerate(content["entries"]):
        try:
            entry = decode(Entry, raw, "entry")
        except ValueError as error:  # the others of the file may be good
            left_out.append(f", entry {number}: {error}")
            continue
        if reason := entry.why_not():
            left_out.append(f", entry {number}: {entry.problem} by {entry.plan.dumps()}: {reason}")
        else:
            entries.append(entry)
    return entries, left_out


def write_file(file: Path, entries: Iterable[Entry]) -> None:
    """Replace `file` by the entries, one a line; readers see the old file or the new one."""
    lines = ",\n".join(entry.dumps() for entry in entries)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = tempfile.NamedTemporaryFile(  # noqa: SIM115, it is closed below
        "w", dir=file.parent, prefix=f".{file.stem}.", suffix=".partial", delete=False
    )
    try:
        with partial:
            partial.write(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
        os.chmod(partial.name, 0o644)  # temporary files are private
        os.replace(partial.name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial.name)
        raise


def store(folder: Path, entry: Entry) -> Path:
    """Write the entry to the file of its key in the user's cache. The sources are no part of the
    file's name: what is measured again takes the place of what was.
    """
    name, where = entry.FILE.format(entry.problem), replace(entry.environment, sources="")
    key = json.dumps([dataclasses.asdict(entry.problem), dataclasses.asdict(where)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    file = folder / slug(where.gpu) / f"{name}_{digest}.json"
    write_file(file, [entry])
    return file
