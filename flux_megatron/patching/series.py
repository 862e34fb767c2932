"""What `patches/` has: one patch, and a folder of fingerprints for each Megatron-LM version."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from flux_megatron import shipped

FOLDER = shipped.folder("patches")
PATCH = "0001-flux-overlap-flag.patch"
FINGERPRINTS = "fingerprints.json"


@dataclass(frozen=True)
class Hunk:
    """Lines to insert into a function of a file, after one of the function's own lines, from 1."""

    path: str
    function: str
    after: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


@dataclass(frozen=True)
class Series:
    """A recorded version: hashes, by path and name, of the functions that hunks go into and of all
    that `integration` relies on. `files` has hashes of the whole files of the latter, which settle
    the usual case quickly.
    """

    folder: Path
    version: str
    hashes: dict[str, dict[str, str]]
    files: dict[str, str]


def supported() -> list[Series]:
    """Every recorded version, the oldest first. `FileNotFoundError` where the folder is missing."""
    found = [load(file.parent) for file in FOLDER.glob(f"*/{FINGERPRINTS}")]
    if not found:
        what = "which a checkout of flux_megatron has and an installed wheel brings"
        raise FileNotFoundError(f"{FOLDER} has no VERSION/{FINGERPRINTS}, {what}")
    return sorted(found, key=lambda series: numbers(series.version))


def load(folder: Path) -> Series:
    return Series(folder, **json.loads((folder / FINGERPRINTS).read_text()))


def hunks() -> list[Hunk]:
    """Those of the patch, in order; `ValueError` unless all they do is insert lines."""
    found: list[Hunk] = []
    path = ""
    for line in (FOLDER / PATCH).read_text().splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif header := re.fullmatch(r"@@ -(\d+),0 \+\d+(?:,\d+)? @@ (\w+)", line):
            found.append(Hunk(path, header[2], int(header[1]), ()))
        elif path and line.startswith("+"):
            found[-1] = replace(found[-1], lines=(*found[-1].lines, line[1:]))
        elif path and not line.startswith("--- a/"):
            raise ValueError(f"{PATCH}: {line!r} found, an insertion into a function expected")
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
