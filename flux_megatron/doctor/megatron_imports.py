"""Which packages a training script of a Megatron-LM checkout imports that this Python lacks.

Megatron-LM's sources are read as text, so this works where neither torch nor megatron can be
imported. Imports in functions, under `if` and in `try` are the script's own to do without.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def missing(checkout: Path, script: str = "pretrain_gpt.py") -> dict[str, str]:
    """Of each package that is not installed the first file that imports it, from `checkout` on."""
    importers = _packages(checkout, checkout / script)
    return {
        name: str(file.relative_to(checkout))
        for name, file in sorted(importers.items())
        if not _installed(name)
    }


def _packages(checkout: Path, script: Path) -> dict[str, Path]:
    """The first importer of each package that is imported on the way from `script`."""
    packages: dict[str, Path] = {}
    seen, left = {script}, [script]
    while left:
        file = left.pop()
        for module in _modules(file, checkout):
            found = _sources(checkout, module)
            if not found:
                packages.setdefault(module.partition(".")[0], file)
            left += [path for path in found if path not in seen]
            seen |= {*found}
    return packages


def _modules(file: Path, checkout: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported. `from a import b` is a, and a.b if that
    is a module of the checkout.
    """
    package = [*file.relative_to(checkout).parent.parts]
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            above = package[: len(package) + 1 - statement.level] if statement.level else []
            base = ".".join([*above, *filter(None, [statement.module])])
            yield base
            for alias in statement.names:
                if _sources(checkout, f"{base}.{alias.name}"):
                    yield f"{base}.{alias.name}"


def _sources(checkout: Path, module: str) -> list[Path]:
    """The files that an import of `module` runs; none for a module of another package."""
    *packages, last = module.split(".")
    folder = checkout.joinpath(*packages)
    ends = [folder / f"{last}.py", folder / last / "__init__.py"]
    if not any(end.is_file() for end in ends) and not (folder / last).is_dir():
        return []
    above = [checkout.joinpath(*packages[:n], "__init__.py") for n in range(1, len(packages) + 1)]
    return [path for path in (*above, *ends) if path.is_file()] or [checkout / "pretrain_gpt.py"]


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a stand-in without a spec is there
        return True
