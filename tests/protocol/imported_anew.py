"""A second import of some modules of the package, which leaves the first as it was."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import flux_megatron

SOURCE = Path(flux_megatron.__file__).parent


def module_name(path: str) -> str:
    """Of a file below the package."""
    return "flux_megatron." + path.removesuffix(".py").replace("/", ".")


@cache
def dependents(changed: str) -> frozenset[str]:
    """The module itself and all that import it, directly or not, wherever they do. The files of
    packages import nothing themselves.
    """
    found, front = {changed}, [changed]
    while front:
        new = _importers().get(front.pop(), set()) - found
        found |= new
        front += new
    return frozenset(found)


@cache
def _importers() -> dict[str, set[str]]:
    importers: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        name = module_name(str(path.relative_to(SOURCE)))
        for node in ast.walk(ast.parse(path.read_text())):
            for imported in _imported(node):
                importers.setdefault(imported, set()).add(name)
    return importers


def _imported(node: ast.AST) -> Iterator[str]:
    """Names of which some are modules: of `from a import b` both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"line {node.lineno}: only absolute imports are followed"
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@contextmanager
def imported_anew(names: Set[str]) -> Iterator[None]:
    """Within, these modules are imported from their files when they are asked for; afterwards they
    are what they were before.
    """
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    _forget(names)
    try:
        yield
    finally:
        _forget(names)
        for name, module in before.items():
            parent, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[parent], last, module)


def _forget(names: Set[str]) -> None:
    for name in names:
        parent, _, last = name.rpartition(".")
        if sys.modules.pop(name, None) is not None:
            delattr(sys.modules[parent], last)  # `from parent import last` asks for it first


class Changed:
    """A finder: the module `name` is read from `file`."""

    def __init__(self, name: str, file: Path) -> None:
        self._name, self._file = name, file

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._file)
