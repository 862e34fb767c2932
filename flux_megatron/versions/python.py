"""Python. Megatron-LM from 0.17 on imports `typing.override`, which Python 3.11 and older lack."""

from __future__ import annotations

import functools
import typing
from typing import Any

from flux_megatron.versions.library import Library

PYTHON = Library("Python", "", oldest="3.10", newest="3.13")
CHILD = "flux_megatron.versions.spawned"


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
        data: dict[str, Any] = original(name)
        if script := data.pop("init_main_from_path", None):
            data["init_main_from_name"] = CHILD
            data["sys_argv"] = [script, *data["sys_argv"][1:]]
        return data

    spawn.get_preparation_data = get_preparation_data
