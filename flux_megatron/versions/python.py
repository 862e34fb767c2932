"""Python. Megatron-LM from 0.17 on imports `typing.override`, which Python 3.11 and older lack."""

from __future__ import annotations

import typing

from flux_megatron.versions.library import Library

PYTHON = Library("Python", "", oldest="3.10", newest="3.13")


def provide_override() -> None:
    """Give `typing` a decorator that does nothing where it has none."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
