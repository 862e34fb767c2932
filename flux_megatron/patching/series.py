"""The patches of one Megatron-LM version: a folder of `patches/`, with its fingerprints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSIDE = _PACKAGE / "patches"  # in an installed package; in a checkout they lie beside it
FOLDER = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent / "patches"
FINGERPRINTS = "fingerprints.json"


@dataclass(frozen=True)
class Hunk:
    """Lines to insert into a file after one of its lines."""

    path: str
    after: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


@dataclass(frozen=True)
class Series:
    """Functions by path and name: the first lines of those that hunks go into, as the hunks' own
    line numbers assume them, and the hashes of these and of all that `integration` relies on.
    `files` has hashes of the whole files of the latter, which settle the usual case quickly.
    """

    folder: Path
    version: str
    touched: dict[str, dict[str, int]]
    hashes: dict[str, dict[str, str]]
    files: dict[str, str]

    @cached_property
    def hunks(self) -> list[Hunk]:
        return read_hunks(self.folder)


def folder_of(name: str) -> Path:
    return FOLDER / name


def supported() -> list[Series]:
    """Every recorded series, oldest version first."""
    found = [load(file.parent) for file in FOLDER.glob(f"*/{FINGERPRINTS}")]
    return sorted(found, key=lambda series: numbers(series.version))


def load(folder: Path) -> Series:
    return Series(folder, **json.loads((folder / FINGERPRINTS).read_text()))


def read_hunks(folder: Path) -> list[Hunk]:
    """The hunks of a series, in order; `ValueError` unless all they do is insert lines."""
    hunks: list[Hunk] = []
    for name in (folder / "series").read_text().split():
        path = ""
        for line in (folder / name).read_text().splitlines():
            if line.startswith("+++ b/"):
                path = line.removeprefix("+++ b/")
            elif header := re.fullmatch(r"@@ -(\d+),0 \+\d+(,\d+)? @@", line):
                hunks.append(Hunk(path, int(header[1]), ()))
            elif path and line.startswith("+"):
                hunks[-1] = replace(hunks[-1], lines=(*hunks[-1].lines, line[1:]))
            elif path and not line.startswith("--- a/"):
                raise ValueError(f"{folder.name}/{name}: {line!r} found, an insertion expected")
    return hunks


def diff(hunks: list[Hunk]) -> str:
    """The hunks as a context-free diff; those of a file stand together and in order.

    Without the line `diff --git`: with it git would pass over a checkout inside another repository,
    in silence.
    """
    lines, inserted, path = [], 0, ""
    for hunk in hunks:
        if hunk.path != path:
            inserted, path = 0, hunk.path
            lines += [f"--- a/{path}", f"+++ b/{path}"]
        lines += [f"@@ -{hunk.after},0 +{hunk.after + inserted + 1},{len(hunk.lines)} @@"]
        lines += [f"+{line}" for line in hunk.lines]
        inserted += len(hunk.lines)
    return "".join(f"{line}\n" for line in lines)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
