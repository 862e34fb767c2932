"""What we use of Triton that its documentation does not name, and what notices a change of it. In
which versions we may, `versions.triton` says; in others Triton launches kernels itself.

| private name | what for | used in | test that notices |
| --- | --- | --- | --- |
| `compiled.run`, `function`, `packed_metadata` | a launch without Triton's checks | \
`triton_launch` | `protocol/test_offline_calls.py` |
| `launcher`, a variable of `CudaLauncher.launch` in 3.6 | the same with descriptors | here | \
`protocol/test_offline_calls.py` |
| `make_tensordesc_arg`, and the last field of its object | the hardware's descriptors | here | \
`protocol/test_offline_calls.py` |
| `metadata.tensordesc_meta`, `global_scratch_size` | the parameters of a kernel, whose sizes the \
driver is asked for | `native_launch`, `triton_launch` | `protocol/test_offline_calls.py` |
| `runtime.build.compile_module_from_src` | compiles `enqueue.c` | `symm.enqueue` | \
`test_enqueue.py` |
| `runtime.cache`, `driver.set_active`, `CudaLauncher` | kernels ahead, without a GPU | \
`compiled_ahead` | `test_compiled_ahead.py` |
| `JITFunction.hash`, `cache_key`, `get_capture_scope` | one hash, whatever was hashed before | \
`triton_launch` | `test_triton_launch.py` |
| the interpreter's builder and `range` | bfloat16, and its slow parts | `interpreter`, \
`interpreter_operators` | `protocol/test_interpreter.py` |
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

MAP_BYTES = 128  # of a descriptor, which lies at a multiple of its size


class Address(NamedTuple):
    """What a descriptor needs of a tensor: kept in its place, it keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=1024)
def launcher_behind(run: Any) -> Callable[..., None]:
    """Of Triton 3.6: what `run`, a compiled kernel's, calls with descriptors expanded."""
    launcher: Callable[..., None] = inspect.getclosurevars(run.launch).nonlocals["launcher"]
    return launcher


@cache
def _maker() -> tuple[Any, int]:
    """What makes descriptors, and how many arguments it takes."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)


def described(descriptor: Any, meta: Any) -> tuple[Any, ...]:
    """A host descriptor as a launch takes it: the hardware's, then sizes and strides."""
    make, count = _maker()
    return tuple(make(*(descriptor, meta, None)[:count]))


def bytes_of(made: Any) -> bytes:
    """The hardware's descriptor, of the first of `described`: the last field of that object."""
    behind = id(made) + type(made).__basicsize__
    return ctypes.string_at(behind - MAP_BYTES, MAP_BYTES)
