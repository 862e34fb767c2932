"""What versions of Triton spell differently in Gluon. No other file asks which version it is.

| | 3.6 | 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- | --- |
| the barrier of all threads | `gl.thread_barrier` | `gl.barrier` | | |
| the constructor of an aggregate | to be written | to be written | made of its fields | |
| a TMA load, a TMA store | `async_copy_...` | | `async_load`, `async_store` | no other |
| shared memory as another type | `_reinterpret` | | | `reinterpret` |

Triton 3.5 has another `warp_specialize` and is too old.
"""

from __future__ import annotations

from typing import get_type_hints

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret

# Types of fields. A number that is always 1 is a constexpr: Triton specialises it.
Number = gl.tensor | gl.constexpr
Pointer = gl.tensor
Shared = _memory
Descriptor = tma.tensor_descriptor
Parts = core.tuple  # several alike: slices of a tile, cuts of K


def aggregate(cls):
    """A named struct of what a kernel computes with: a class with annotated fields, whose methods
    are `gluon.jit` functions. Its constructor takes the fields in their order.
    """
    fields = cls.__annotations__ = get_type_hints(cls)

    def construct(self, *values):
        for name, value in zip(fields, values, strict=True):
            known = isinstance(value, core.base_value)
            setattr(self, name, value if known else core.constexpr(value))

    construct.__triton_builtin__ = True  # type: ignore[attr-defined]  # no part of a kernel's key
    cls.__init__ = construct
    return core._aggregate(cls)
