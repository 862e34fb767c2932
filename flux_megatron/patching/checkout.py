"""The patch and a Megatron-LM checkout: does it fit, put it in, take it out."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from flux_megatron.errors import BadInput, FluxError
from flux_megatron.patching.fingerprints import Function, functions
from flux_megatron.patching.series import Series, hunks, numbers, supported
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
    patched: dict[str, str] = {}
    for hunk in reversed(hunks()):  # the later ones first: they move nothing above them
        lines = (patched.get(hunk.path) or _read(checkout, hunk.path)).split("\n")
        place = _unpatched(checkout, hunk.path)[hunk.function].first - 1 + hunk.after
        lines[place:place] = hunk.lines
        patched[hunk.path] = "\n".join(lines)
    _write(checkout, patched)
    return state


def undo(checkout: Path) -> State:
    """Take the patches out, wherever they are; returns the state before.

    `Refused` unless all of them are in.
    """
    state = examine(checkout)
    if not state.applied:
        raise Refused(str(state))
    restored: dict[str, str] = {}
    for hunk in hunks():
        source = restored.get(hunk.path) or _read(checkout, hunk.path)
        restored[hunk.path] = source.replace(hunk.text, "", 1)
    _write(checkout, restored)
    return state


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
    return functions(source.replace("\r\n", "\n"))


def _read(checkout: Path, path: str) -> str:
    """Nothing for a file that is not there. Ends of lines stay as they are."""
    file = checkout / path
    return file.read_bytes().decode() if file.is_file() else ""


def _write(checkout: Path, sources: dict[str, str]) -> None:
    """Each file at once, or not at all: a full disk leaves what was there."""
    for path, source in sources.items():
        file = (checkout / path).resolve()
        new = file.with_name(f"{file.name}.patched")
        try:
            new.write_bytes(source.encode())
            shutil.copymode(file, new)
            new.replace(file)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise Refused(f"{file}: {error}") from None


def _distance(version: str, other: str) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(numbers(version), numbers(other), strict=True))
