"""Patches and a Megatron-LM checkout: does it fit them, put them in, take them out, record it."""

from __future__ import annotations

import json
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
    hunks,
    numbers,
    supported,
)
from flux_megatron.versions.megatron_core import PACKAGE_INFO, version_in


class Refused(FluxError):
    """The patches do not fit the checkout, or it is not in the state asked for. Nothing changed."""

    exit_status = 1


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
    ours = hunks()
    present = [hunk.text in _read(checkout, hunk.path) for hunk in ours]
    differences = _differences(checkout, series)
    if numbers(version)[:2] != numbers(series.version)[:2]:
        known = ", ".join(f"{one.version} ({one.folder.name})" for one in supported())
        differences.insert(0, f"version {version} found, one of {known} expected")
    if any(present) and not all(present):
        there = {hunk.path for hunk, found in zip(ours, present, strict=True) if found}
        differences.append(f"only a part of the patches is applied, in {', '.join(sorted(there))}")
    return State(checkout, version, series, differences, all(present))


def apply(checkout: Path) -> State:
    """Put the patches in; returns the state before. `Refused` unless they fit and are not in."""
    state = examine(checkout)
    if state.differences or state.applied:
        raise Refused(str(state))
    _git_apply(checkout, [_placed(hunk, checkout) for hunk in hunks()])
    return state


def undo(checkout: Path) -> State:
    """Take the patches out, wherever they are; returns the state before.

    `Refused` unless all of them are in.
    """
    state = examine(checkout)
    if not state.applied:
        raise Refused(str(state))
    _git_apply(checkout, hunks(), "--reverse")
    return state


def record(checkout: Path, name: str) -> Path:
    """Write, to `patches/NAME`, the fingerprints of this unpatched checkout, and the names by which
    its options reach our layers.

    Returns the former's file. `Refused` where the patch is in, or has no function to go into.
    """
    folder = folder_of(name)
    version = version_of(checkout)
    names = {path: set(names) for path, names in RELIED_ON.items()}
    for hunk in hunks():
        source = _read(checkout, hunk.path)
        if hunk.text in source:
            raise Refused(f"{checkout}: {hunk.path} is patched already, undo that first")
        if hunk.function not in functions(source):
            raise Refused(f"{checkout}: {hunk.path} has no function {hunk.function}")
        names.setdefault(hunk.path, set()).add(hunk.function)
    hashes = {}
    for path in sorted(names):
        found = functions(_read(checkout, path))
        hashes[path] = {name: found[name].sha256 for name in sorted(names[path] & found.keys())}
    files = {path: digest(text) for path in RELIED_ON if (text := _read(checkout, path))}
    content = {"version": version, "hashes": hashes, "files": files}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FINGERPRINTS
    file.write_text(json.dumps(content, indent=1) + "\n")
    seams.write(checkout, folder)
    return file


def version_of(checkout: Path) -> str:
    """The version in `megatron.core`, such as "0.16.1"; a release's tag may say otherwise."""
    if (version := version_in(checkout)) is None:
        raise BadInput(
            f"{checkout} is no checkout of Megatron-LM: no version in {PACKAGE_INFO} found"
        )
    return version


def _differences(checkout: Path, series: Series) -> list[str]:
    different = []
    for path, expected in series.hashes.items():
        found = _unpatched(checkout, path)
        for name, sha256 in expected.items():
            if name not in found:
                different.append(f"{path}: {name} is missing")
            elif found[name].sha256 != sha256:
                different.append(f"{path}: {name} has another text")
    return different


def _unpatched(checkout: Path, path: str) -> dict[str, Function]:
    source = _read(checkout, path)
    for hunk in hunks():
        source = source.replace(hunk.text, "", 1)
    return functions(source)


def _placed(hunk: Hunk, checkout: Path) -> Hunk:
    """The hunk at the lines of the file where its function is."""
    function = functions(_read(checkout, hunk.path))[hunk.function]
    return replace(hunk, after=function.first - 1 + hunk.after)


def _git_apply(checkout: Path, placed: list[Hunk], *options: str) -> None:
    """All hunks or none."""
    try:
        done = subprocess.run(
            ["git", "apply", "--unidiff-zero", *options], input=diff(placed),
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
