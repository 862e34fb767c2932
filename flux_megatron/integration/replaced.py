"""What we replace in modules and classes of others while a process runs: the table `replaced.tsv`.

`put`, `put_everywhere` and `around` do it, and refuse a name that is not in the table.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("replaced.tsv")


class Row(NamedTuple):
    """`where`: modules, or classes as module:class."""

    names: tuple[str, ...]
    where: tuple[str, ...]
    asked_by: str
    releases: str
    test: str
    why: str


@functools.cache
def table() -> tuple[Row, ...]:
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    cells = [line.split("\t") for line in lines]
    return tuple(Row(tuple(one[0].split()), tuple(one[1].split()), *one[2:]) for one in cells)


def row(name: str) -> Row:
    """The first one with this name."""
    found = next((row for row in table() if name in row.names), None)
    assert found is not None, f"{name}: no row of {FILE.name} has it"
    return found


def put_everywhere(name: str, value: Any, undo: contextlib.ExitStack | None = None) -> None:
    """In the places of the name's first row that are loaded, where modules have such a name."""
    for place in row(name).where:
        path, _, kind = place.partition(":")
        module = sys.modules.get(path)
        if module and (kind or name in vars(module)):
            put(getattr(module, kind) if kind else module, name, value, undo)


def put(owner: Any, name: str, value: Any, undo: contextlib.ExitStack | None = None) -> None:
    """Give a class or module this attribute, until `undo` closes; what others have put in its place
    meanwhile stays.
    """
    row(name)
    if undo is not None:
        undo.callback(_put_back, owner, name, value, vars(owner)[name])
    setattr(owner, name, value)


def _put_back(owner: Any, name: str, ours: Any, original: Any) -> None:
    if vars(owner)[name] is ours:
        setattr(owner, name, original)


def around(
    owner: Any, name: str, undo: contextlib.ExitStack | None = None
) -> Callable[[Callable[..., Any]], None]:
    """Decorates what is called in place of a function, with that function before its arguments.

    Where it is around already, nothing changes: Megatron parses its arguments up to three times.
    When `undo` has closed, wrappers of others that still call it reach that function alone.
    """

    def put_around(ours: Callable[..., Any]) -> None:
        original = now = getattr(owner, name)
        while now is not None:
            if ours.__code__ in getattr(now, "code_around", ()):
                return
            now = getattr(now, "__wrapped__", None)

        code = [ours.__code__]  # none when it is undone; a wrapper's attribute is the same list

        @functools.wraps(original)
        def replacement(*given: Any, **named: Any) -> Any:
            return ours(original, *given, **named) if code else original(*given, **named)

        replacement.code_around = code  # type: ignore[attr-defined]
        put(owner, name, replacement, undo)
        if undo is not None:
            undo.callback(code.clear)

    return put_around
