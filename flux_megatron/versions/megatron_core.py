"""megatron-core. From 0.17 on it needs Python 3.12.

The functions that we replace or rely on are held against each recorded release by their text
(`patching.fingerprints`), and its arguments by their names (`integration.arguments`), so that what
differs in a newer one is refused by its name. What our layers find in one of two places:

| | to 0.16 | from 0.17 on |
| --- | --- | --- |
| the experts of a provider (`integration.provider`) | a class | a class, or a partial of it |
| `qk_l2_norm` (`lab.train.specs`) | an argument of specifications to 0.15 | the configuration's |
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from flux_megatron.errors import BadInput
from flux_megatron.versions.library import Library

MEGATRON_CORE = Library("megatron-core", "megatron.core", oldest="0.14", newest="0.19")
SUPPORTED = f"{MEGATRON_CORE.oldest} to {MEGATRON_CORE.newest} are supported"
PACKAGE_INFO = "megatron/core/package_info.py"


def version_in(folder: Path) -> str | None:
    """Such as 0.16.1, read from the sources in a checkout or beside other packages; a release's tag
    may say otherwise. None where they are not there.
    """
    file = folder / PACKAGE_INFO
    text = file.read_text(encoding="utf-8") if os.path.isfile(file) else ""
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
    names = ("MAJOR", "MINOR", "PATCH")
    return ".".join(parts[name] for name in names) if len(parts) == len(names) else None


def check(*folders: Path) -> None:
    """`BadInput` for a release that is too old, before any of it is imported: an import would end
    somewhere in its midst. It is the one that lies in the first of `folders` that has one, else the
    one that this Python would import.
    """
    for folder in chain(folders, _imported_from()):
        if (version := version_in(folder)) is not None:
            if MEGATRON_CORE.is_too_old(version):
                raise BadInput(f"Megatron-LM {version} in {folder} is too old: {SUPPORTED}")
            return


def _imported_from() -> Iterator[Path]:
    try:
        found = importlib.util.find_spec("megatron.core")
    except (ModuleNotFoundError, ValueError):  # a module made by hand has no specification
        found = None
    places = (found.submodule_search_locations if found else None) or []
    yield from (Path(place).parents[1] for place in places)
