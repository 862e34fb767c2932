"""A library of which some versions were run. Others are not forbidden: a newer one warns once."""

from __future__ import annotations

import os
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata

_warned: set[str] = set()


def release(version: str) -> tuple[int, ...]:
    """(2, 15) of "2.15.1+cu130": patches do not matter. `ValueError` for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"version {version!r} given, such as 2.15.1 expected")
    return tuple(map(int, found.groups()))


def version_of(distribution: str) -> str | None:
    """Of what is installed, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Library:
    """`distribution` is installed, `module` imported. `oldest` and `newest` were run."""

    distribution: str
    module: str
    oldest: str
    newest: str

    def version(self) -> str | None:
        """Of the imported module, else of what is installed, or None."""
        loaded = getattr(sys.modules.get(self.module), "__version__", None)
        if loaded is not None:
            return str(loaded)
        return version_of(self.distribution)

    def since(self, version: str) -> bool:
        """Whether it is there, in this version or a newer one."""
        found = self.version()
        return found is not None and release(found) >= release(version)

    def untested(self, version: str | None = None) -> str | None:
        """What to say of a version, by default the one that is there: that it is newer than all
        that were run. None of another one, of a version that is no number, or if none is there.
        """
        found = self.version() if version is None else version
        try:
            newer = found is not None and release(found) > release(self.newest)
        except ValueError:
            return None
        if not newer:
            return None
        return f"{self.distribution} {found} is newer than {self.newest}, the newest that was run"

    def is_too_old(self, version: str) -> bool:
        return release(version) < release(self.oldest)


def warn_of_untested(*libraries: Library) -> None:
    """Warn of each library that is newer than what was run, once a process and on rank 0 alone."""
    for library in libraries:
        if library.distribution in _warned:
            continue
        _warned.add(library.distribution)
        text = library.untested()
        if text and os.environ.get("RANK", "0") == "0":
            remedy = "flux-megatron doctor says what is known of this machine"
            warnings.warn(f"flux_megatron: {text}; {remedy}", stacklevel=3)
