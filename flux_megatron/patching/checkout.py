"""Patches and a Megatron-LM checkout: does it fit them, put them in, take them out, record it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from flux_megatron.errors import BadInput, FluxError
from flux_megatron.patching import seams
from flux_megatron.patching.fingerprints import RELIED_ON, Function, digest, functions
from flux_megatron.patching.series import (
    FINGERPRINTS,
    Hunk,
    Series,
    diff,
    folder_of,
    numbers,
    read_hunks,
    supported,
)

PACKAGE_INFO = "megatron/core/package_info.py"


class Refused(FluxError):
    """The patches do not fit the checkout, or it is not in the state asked for. Nothing changed."""


@dataclass(frozen=True)
class State:
    """How a checkout compares with the series that is closest to its version."""

    checkout: Path
    version: str
    series: Series
    differences: list[str]
    applied: bool

    def __str__(self) -> str:
        name = self.series.folder.name
        if self.differences:
            return (
                f"Megatron-LM {self.version} in {self.checkout} is not what the patches of {name} "
                "were made for:\n  " + "\n  ".join(self.differences)
            )
        found = "already applied" if self.applied else "not applied"
        return (
            f"Megatron-LM {self.version} in {self.checkout}: "
            f"the patches of {name} fit and are {found}"
        )


def examine(checkout: Path) -> State:
    """Compare a checkout, our insertions left out, with the series closest to its version.

    `BadInput` for a folder that is no checkout.
    """
    version = version_of(checkout)
    series = min(supported(), key=lambda one: _distance(version, one.version))
    present = [hunk.text in _read(checkout, hunk.path) for hunk in series.hunks]
    differences = _differences(checkout, series)
    if numbers(version)[:2] != numbers(series.version)[:2]:
        known = ", ".join(f"{one.version} ({one.folder.name})" for one in supported())
        differences.insert(0, f"version {version} found, one of {known} expected")
    if any(present) and not all(present):
        there = {hunk.path for hunk, found in zip(series.hunks, present, strict=True) if found}
        differences.append(f"only a part of the patches is applied, in {', '.join(sorted(there))}")
    return State(checkout, version, series, differences, all(present))


def apply(checkout: Path) -> State:
    """Put the patches in; returns the state before. `Refused` unless they fit and are not in."""
    state = examine(checkout)
    if state.differences or state.applied:
        raise Refused(str(state))
    _git_apply(checkout, [_moved(hunk, state) for hunk in state.series.hunks])
    return state


def undo(checkout: Path) -> State:
    """Take the patches out, wherever they are; returns the state before.

    `Refused` unless all of them are in.
    """
    state = examine(checkout)
    if not state.applied:
        raise Refused(str(state))
    _git_apply(checkout, state.series.hunks, "--reverse")
    return state


def record(checkout: Path, name: str) -> Path:
    """Write the fingerprints of `patches/NAME`, whose line numbers fit this unpatched checkout, and
    the names by which its options reach our layers.

    Returns the former's file. `Refused` if there are no patches, or a hunk is in no function.
    """
    folder = folder_of(name)
    if not (folder / "series").is_file():
        raise Refused(f"{folder} has no series: put patches there first")
    version = version_of(checkout)
    touched: dict[str, dict[str, int]] = {}
    names = {path: set(names) for path, names in RELIED_ON.items()}
    for hunk in read_hunks(folder):
        if hunk.text in _read(checkout, hunk.path):
            raise Refused(f"{checkout}: {hunk.path} is patched already, undo that first")
        name, function = _around(hunk, checkout)
        touched.setdefault(hunk.path, {})[name] = function.first
        names.setdefault(hunk.path, set()).add(name)
    hashes = {}
    for path in sorted(names):
        found = functions(_read(checkout, path))
        hashes[path] = {name: found[name].sha256 for name in sorted(names[path] & found.keys())}
    files = {path: digest(text) for path in RELIED_ON if (text := _read(checkout, path))}
    content = {"version": version, "touched": touched, "hashes": hashes, "files": files}
    file = folder / FINGERPRINTS
    file.write_text(json.dumps(content, indent=1) + "\n")
    seams.write(checkout, folder)
    return file


def version_of(checkout: Path) -> str:
    """The version in `megatron.core`, such as "0.16.1"; a release's tag may say otherwise."""
    text = _read(checkout, PACKAGE_INFO)
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
    if len(parts) < 3:
        raise BadInput(
            f"{checkout} is no checkout of Megatron-LM: no version in {PACKAGE_INFO} found"
        )
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def _differences(checkout: Path, series: Series) -> list[str]:
    different = []
    for path, expected in series.hashes.items():
        found = _unpatched(checkout, path, series)
        for name, sha256 in expected.items():
            if name not in found:
                different.append(f"{path}: {name} is missing")
            elif found[name].sha256 != sha256:
                different.append(f"{path}: {name} has another text")
    return different


def _unpatched(checkout: Path, path: str, series: Series) -> dict[str, Function]:
    source = _read(checkout, path)
    for hunk in series.hunks:
        source = source.replace(hunk.text, "", 1)
    return functions(source)


def _moved(hunk: Hunk, state: State) -> Hunk:
    """The hunk, moved by as many lines as its function was."""
    found = _unpatched(state.checkout, hunk.path, state.series)
    for name, line in state.series.touched[hunk.path].items():
        function, moved_by = found[name], found[name].first - line
        if hunk.after + moved_by in function.inside:
            return replace(hunk, after=hunk.after + moved_by)
    raise AssertionError(f"{state.series.folder} records no function around {hunk}")


def _around(hunk: Hunk, checkout: Path) -> tuple[str, Function]:
    """The innermost function around a hunk, and its name."""
    found = functions(_read(checkout, hunk.path)).items()
    around = [(name, function) for name, function in found if hunk.after in function.inside]
    if not around:
        raise Refused(f"{checkout}: line {hunk.after} of {hunk.path} is in no function")
    return max(around, key=lambda one: one[1].first)


def _git_apply(checkout: Path, hunks: list[Hunk], *options: str) -> None:
    """All hunks or none."""
    try:
        done = subprocess.run(
            ["git", "apply", "--unidiff-zero", *options], input=diff(hunks),
            cwd=checkout, text=True, capture_output=True, timeout=60,
        )  # fmt: skip
    except FileNotFoundError:
        raise Refused("the program git was not found; it applies the patches") from None
    if done.returncode:
        raise Refused(f"git apply in {checkout}: {done.stderr.strip()}")


def _read(checkout: Path, path: str) -> str:
    """Nothing for a file that is not there."""
    file = checkout / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _distance(version: str, other: str) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(numbers(version), numbers(other), strict=True))
