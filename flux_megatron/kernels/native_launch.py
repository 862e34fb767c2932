"""A launch of a compiled kernel as its driver call, for lists of such calls (`symm.enqueue`).

The parameters of a kernel that Triton has compiled are those of its signature that are no
constexprs, a host descriptor being the hardware's and then its sizes and strides; behind them come
two addresses of scratch memory. The driver is asked for the sizes of all: where they are others,
or this Triton makes descriptors in another way, there is no such launch, and the reason is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flux_megatron.kernels import triton_private
from flux_megatron.symm import enqueue
from flux_megatron.symm.enqueue import Operand
from flux_megatron.symm.lru_cache import LRUCache

_CODES = {"i32": "I", "u32": "I", "i64": "Q", "u64": "Q"}  # of struct
_MAP = "128s"  # of a descriptor, which lies at a multiple of its size, as all do
_SIZE_OF = {"I": 4, "Q": 8, _MAP: triton_private.MAP_BYTES}
# how operands go into parameters, as in enqueue.c; constexprs are none
_WORD, _ADDRESS, _DESCRIPTOR, _NONE = range(4)

Arguments = tuple[Any, ...]


class Unusable(Exception):
    """Why a kernel cannot be launched so. No caller sees it: Python launches the kernel."""


class Layout(NamedTuple):
    """How a compiled kernel's parameters lie in memory: `places` of those that `packed` makes of
    numbers and descriptors; how each of Triton's own goes there; what Triton has of descriptors.
    """

    packed: struct.Struct
    places: tuple[int, ...]
    ways: tuple[int, ...]
    metas: tuple[Any, ...]


def layout_of(name: str, compiled: Any, names: Sequence[str]) -> Layout:
    """`Unusable` where the driver knows others, or a launch is of another kind."""
    metadata = compiled.metadata
    if compiled.packed_metadata[1] != 1 or metadata.profile_scratch_size:
        raise Unusable(f"{name} needs a launch of another kind")
    if metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise Unusable(f"{name} needs a launch of another kind")
    kinds = tuple(compiled.src.signature[parameter] for parameter in names)
    metas = tuple(getattr(metadata, "tensordesc_meta", None) or ())
    codes: list[str] = []
    ways: list[int] = []
    for parameter, kind in zip(names, kinds, strict=True):
        if kind.startswith("tensordesc"):
            if ways.count(_DESCRIPTOR) == len(metas) or metas[ways.count(_DESCRIPTOR)] is None:
                raise Unusable(f"{name} takes {parameter} in pieces")
            codes += [_MAP, *"II", *"QQ"]  # of a matrix: sizes and strides
            ways.append(_DESCRIPTOR)
        elif kind.startswith("*") or kind in _CODES:
            codes.append(_CODES.get(kind, "Q"))
            ways.append(_ADDRESS if codes[-1] == "Q" else _WORD)
        elif kind == "constexpr":
            ways.append(_NONE)
        else:
            raise Unusable(f"{name} takes {parameter} as {kind}")
    codes += "QQ"  # of scratch memory
    sizes = [_SIZE_OF[code] for code in codes]
    if (known := enqueue.native().parameters(compiled.function)) != sizes:
        raise Unusable(f"{name}: parameters of {known} bytes, {sizes} expected")
    spelled, places, end = "<", [], 0
    for code, size in zip(codes, sizes, strict=True):
        spelled += f"{-end % size}x{code}"
        places.append(end + -end % size)
        end = places[-1] + size
    return Layout(struct.Struct(spelled), tuple(places), tuple(ways), metas)


def arguments(
    compiled: Any, layout: Layout, grid: tuple[int, ...], given: Sequence[Any],
    address: Callable[[Operand], int], scratch: Operand | None,
) -> Arguments:  # fmt: skip
    """What `List.launch` takes behind the stream. `given` are the kernel's parameters, as a step
    has them; `address` is that of an operand now.
    """
    places, metas = layout.places, iter(layout.metas)
    packed: list[Any] = []
    patches: list[tuple[int, int, Operand]] = []
    for way, value in zip(layout.ways, given, strict=True):
        if way == _NONE:
            continue
        if type(value) is int:
            packed.append(value % (1 << 32 if way == _WORD else 1 << 64))
            continue
        operand = value if type(value) is Operand else value.operand
        patches.append((way, places[len(packed)], operand))
        if way == _DESCRIPTOR:
            packed += _described(value, next(metas), address(operand))
        else:
            packed.append(0)
    if scratch is not None:
        patches.append((_ADDRESS, places[len(packed)], scratch))
    packed += [0, 0]
    warps, _, shared = compiled.packed_metadata[:3]
    x, y, z = (*grid, 1, 1)[:3]
    return (
        compiled.function, (x, y, z), 32 * warps, shared, layout.packed.pack(*packed), places,
        tuple(patches),
    )  # fmt: skip


def _described(descriptor: Any, meta: Any, address: int) -> tuple[Any, ...]:
    """The hardware's descriptor of a tensor at any address, and sizes and strides, as this Triton's
    launcher makes them.
    """
    key = (*descriptor.kind, id(meta))  # a kernel that is compiled stays
    if (found := _known.get(key)) is None:
        made, *sizes = triton_private.described(descriptor.at(address), meta)
        found = _known[key] = (triton_private.bytes_of(made), *sizes)
    return found


_known: LRUCache[tuple[Any, ...], tuple[Any, ...]] = LRUCache(4096)
