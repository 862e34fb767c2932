"""A launch of a compiled kernel as its driver call, for lists of such calls (`symm.recording`).

The parameters of a kernel that Triton has compiled are those of its signature that are no
constexprs, a host descriptor being the hardware's and then its sizes and strides; behind them come
two addresses of scratch memory. The driver is asked for the sizes of all: where they are others,
or this Triton makes descriptors in another way, there is no such launch, and the reason is given.
"""

from __future__ import annotations

import ctypes
import inspect
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from flux_megatron.symm import enqueue
from flux_megatron.symm.recording import EPOCH, Launch, Recording, Unrecordable

_CODES = {"i32": "I", "u32": "I", "i64": "Q", "u64": "Q"}  # of struct
_MAP = "128s"  # of a descriptor, which lies at a multiple of its size, as all do
_SIZE_OF = {"I": 4, "Q": 8, _MAP: 128}
_WORD, _ADDRESS, _DESCRIPTOR = range(3)  # how words go into parameters, as in enqueue.c
_NUMBERS_OF_CALLS = ("epoch", "gather_epoch")


class _Layout(NamedTuple):
    """How a compiled kernel's parameters lie in memory: `places` of those that `packed` makes of
    numbers and descriptors. `kinds` are those of Triton, of its own parameters.
    """

    packed: struct.Struct
    places: tuple[int, ...]
    kinds: tuple[str, ...]


@lru_cache(maxsize=256)
def _layout(name: str, compiled: Any, names: tuple[str, ...]) -> _Layout:
    """`Unrecordable` where the driver knows others, or a launch is of another kind."""
    metadata = compiled.metadata
    if compiled.packed_metadata[1] != 1 or metadata.profile_scratch_size:
        raise Unrecordable(f"{name} needs a launch of another kind")
    if metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise Unrecordable(f"{name} needs a launch of another kind")
    kinds = tuple(compiled.src.signature[parameter] for parameter in names)
    metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
    codes: list[str] = []
    for parameter, kind in zip(names, kinds, strict=True):
        if kind.startswith("tensordesc"):
            if next(metas, None) is None:
                raise Unrecordable(f"{name} takes {parameter} in pieces")
            codes += [_MAP, *"II", *"QQ"]  # of a matrix: sizes and strides
        elif kind.startswith("*") or kind in _CODES:
            codes.append(_CODES.get(kind, "Q"))
        elif kind != "constexpr":
            raise Unrecordable(f"{name} takes {parameter} as {kind}")
    codes += "QQ"  # of scratch memory
    sizes = [_SIZE_OF[code] for code in codes]
    if (known := enqueue.native().parameters(compiled.function)) != sizes:
        raise Unrecordable(f"{name}: parameters of {known} bytes, {sizes} expected")
    spelled, places, end = "<", [], 0
    for code, size in zip(codes, sizes, strict=True):
        spelled += f"{-end % size}x{code}"
        places.append(end + -end % size)
        end = places[-1] + size
    return _Layout(struct.Struct(spelled), tuple(places), kinds)


def launch(
    name: str, compiled: Any, grid: tuple[int, ...], names: Sequence[str], values: Sequence[Any],
    recording: Recording, scratch: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """The launch that Triton has made of `values`; `names` are theirs. `Unrecordable`: why not."""
    layout = _layout(name, compiled, tuple(names))
    given: list[Any] = []
    patches: list[tuple[int, int, enqueue.Word]] = []

    def changes(how: int, word: enqueue.Word) -> None:
        if word.register:
            patches.append((how, layout.places[len(given)], word))

    def add_address(address: int) -> None:
        changes(_ADDRESS, recording.address(address))
        given.append(address)

    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for parameter, kind, value in zip(names, layout.kinds, values, strict=True):
        if kind.startswith("tensordesc"):
            changes(_DESCRIPTOR, recording.address(value.base.data_ptr()))
            made, *sizes = _expanded(value, next(metas))
            given += [_bytes_of(made), *sizes]
        elif kind.startswith("*"):
            add_address(value)
        elif kind != "constexpr":
            if parameter in _NUMBERS_OF_CALLS:
                changes(_WORD, EPOCH)
            given.append(value % (1 << (64 if kind.endswith("64") else 32)))
    add_address(0 if scratch is None else scratch.data_ptr())
    given.append(0)
    warps, _, shared = compiled.packed_metadata[:3]
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(name, (
        compiled.function, (x, y, z), 32 * warps, shared, layout.packed.pack(*given), layout.places,
        tuple(patches),
    ))  # fmt: skip


def _expanded(descriptor: Any, meta: Any) -> list[Any]:
    """The hardware's descriptor, and sizes and strides, as this Triton's launcher makes them."""
    make, count = _maker()
    return make(*(descriptor, meta, None)[:count])


@cache
def _maker() -> tuple[Any, int]:
    """What makes them, and how many arguments it takes."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)


def _bytes_of(made: Any) -> bytes:
    """What Triton's object of a descriptor holds: its last field."""
    behind = id(made) + type(made).__basicsize__
    return ctypes.string_at(behind - _SIZE_OF[_MAP], _SIZE_OF[_MAP])
