"""Python. Megatron-LM after 0.17 takes `override` from `typing`, where 3.12 put it."""

from __future__ import annotations

import functools
import typing
from typing import Any

from flux_megatron.versions.library import Library

PYTHON = Library("Python", "", oldest="3.10", newest="3.13")


def provide_override() -> None:
    """Give `typing` a decorator that does nothing where it has none, in the processes that
    multiprocessing spawns too: Megatron's checkpoint writers import the script again.
    """
    if hasattr(typing, "override"):
        return
    typing.override = lambda method: method  # type: ignore[attr-defined]
    from multiprocessing import spawn

    original: Any = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return original(name) | {"flux_megatron": _Provided()}

    spawn.get_preparation_data = get_preparation_data


class _Provided:
    """Whoever unpickles it has `override`; a new process does so before it imports the script."""

    def __reduce__(self) -> Any:
        return provide_override, ()
