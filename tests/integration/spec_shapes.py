"""Parts of layer specifications: a ModuleSpec, or from 0.17 on a partial in its place."""

from __future__ import annotations

import functools
from typing import Any


def submodules_of(part: Any) -> Any:
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules


def module_of(part: Any) -> Any:
    if not isinstance(part, functools.partial):
        return part.module
    return getattr(part.func, "__self__", part.func)  # a class or a method of it that builds one
