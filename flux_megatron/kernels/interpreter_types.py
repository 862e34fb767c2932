"""Types of Triton's interpreter, made once and not for every operation on every number.

What a kernel computes is the same; our kernels run in two thirds of the time (triton 3.7.1).
"""

from __future__ import annotations

import functools
import math
from typing import Any


def make_types_once(interpreter: Any) -> None:
    import triton.language.core as language

    if hasattr(language.block_type.__init__, "nothing_left"):  # by another copy of this package
        return
    interpreter._get_np_dtype = _once_a_scalar(interpreter._get_np_dtype)
    _make_block_types_once(language)

    @functools.cache
    def shape_and_size(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        shape = language.tuple([language.constexpr(size) for size in sizes])
        return shape, language.constexpr(math.prod(sizes))

    def initialise(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_size(tuple(type.shape) if type.is_block() else ())

    language.tensor.__init__ = initialise


def _once_a_scalar(np_dtype_of: Any) -> Any:
    known: dict[str, Any] = {}

    def known_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = np_dtype_of(scalar)
        return known[scalar.name]

    return known_np_dtype


def _make_block_types_once(language: Any) -> None:
    initialise, known = language.block_type.__init__, {}

    def new(cls: type, element: Any, shape: Any) -> Any:
        sizes = tuple(language._unwrap_if_constexpr(size) for size in shape)
        key = (cls, type(element), element.name, sizes)
        if key not in known:
            known[key] = object.__new__(cls)
            initialise(known[key], element, shape)
        return known[key]

    def made(self: Any, element: Any, shape: Any) -> None: ...

    made.nothing_left = True  # type: ignore[attr-defined]
    language.block_type.__new__, language.block_type.__init__ = new, made
