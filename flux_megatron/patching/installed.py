"""The Megatron of this process: are the functions that we replace or rely on those we know?

It must not slow a launch down. A file whose text is that of a recorded release is not read further;
others are parsed, and their functions compared with those of every release.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flux_megatron.patching.fingerprints import RELIED_ON, digest, functions
from flux_megatron.patching.series import Series, supported


@cache
def changed() -> tuple[tuple[str, str], ...]:
    """Functions with another text than in every recorded release, and missing ones, with reasons.

    A program without Megatron's training loop has nothing of it that could have changed.
    """
    known = supported()
    return tuple(
        one
        for path in RELIED_ON
        if (file := _file(path)) is not None
        for one in differences(path, file.read_text(encoding="utf-8"), known)
    )


def differences(path: str, source: str, known: list[Series]) -> Iterator[tuple[str, str]]:
    """(name, reason) for each function that `path` of some release has, but not with this text."""
    if digest(source) in {series.files.get(path) for series in known}:
        return
    found = functions(source)
    recorded = [series.hashes.get(path, {}) for series in known]
    for name in RELIED_ON[path]:
        texts = {hashes[name] for hashes in recorded if name in hashes}
        if name not in found:
            if all(name in hashes for hashes in recorded if hashes):
                yield name, f"{path} has no such function, every release that we know has"
        elif found[name].sha256 not in texts:
            yield name, f"its text in {path} is that of no release that we know"


def _file(path: str) -> Path | None:
    """The file in the package that would be imported, or None where there is none."""
    megatron, package, *rest = path.split("/")
    try:
        found = importlib.util.find_spec(f"{megatron}.{package}")
    except (ModuleNotFoundError, ValueError):  # a module made by hand has no specification
        found = None
    folders = (found.submodule_search_locations if found else None) or []
    return next((f for folder in folders if (f := Path(folder, *rest)).is_file()), None)
