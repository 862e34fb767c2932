"""A launch of a compiled kernel as its driver call, for lists of such calls (`symm.enqueue`).

The parameters of a kernel that Triton has compiled are those of its signature that are no
constexprs, a host descriptor being the hardware's and then its sizes and strides; behind them come
two addresses of scratch memory. The driver is asked for the sizes of all: where they are others,
or this Triton makes descriptors in another way, there is no such launch, and the reason is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from flux_megatron.kernels import triton_private
from flux_megatron.symm import enqueue
from flux_megatron.symm.enqueue import Operand

_WORDS, _ADDRESSES = ("i32", "u32"), ("i64", "u64")
# how values go into parameters, as in enqueue.c, and their bytes there; behind a descriptor, which
# lies at a multiple of its size, are its sizes and strides
_WORD, _ADDRESS, _DESCRIPTOR = range(3)
_BYTES = {_WORD: [4], _ADDRESS: [8], _DESCRIPTOR: [triton_private.MAP_BYTES, 4, 4, 8, 8]}
_NO_DESCRIPTOR = (0, 0, 0, 0, 0)
_SCRATCH = ("i64", "scratch memory"), ("i64", "scratch memory of a profiler")
_PLAIN = (int, Operand)
_COMPARED = 256, 512  # rows and columns of a matrix
_TYPES = {10: 9}  # the numbers of types in PTX are the driver's, but that of bfloat16


class Unusable(Exception):
    """Why a kernel cannot be launched so. No caller sees it: Python launches the kernel."""


class Layout(NamedTuple):
    """How a compiled kernel's parameters lie in so many bytes: `pick` takes those of Triton's that
    are parameters, `parameters` are theirs and scratch memory's, as enqueue.c has them.
    """

    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    size: int
    parameters: bytes


def layout_of(name: str, compiled: Any, names: Sequence[str], given: Sequence[Any]) -> Layout:
    """Of a launch with these parameters. `Unusable` where the driver knows others, the launch is of
    another kind, or Triton makes descriptors in another way.
    """
    metadata = compiled.metadata
    if compiled.packed_metadata[1] != 1 or metadata.profile_scratch_size:
        raise Unusable(f"{name} needs a launch of another kind")
    if metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise Unusable(f"{name} needs a launch of another kind")
    metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
    kinds = [compiled.src.signature[parameter] for parameter in names]
    picked = [at for at, kind in enumerate(kinds) if kind != "constexpr"]
    packed, sizes, end = b"", list[int](), 0
    for kind, parameter in [*((kinds[at], names[at]) for at in picked), *_SCRATCH]:
        how, numbers = _way(name, parameter, kind), _NO_DESCRIPTOR
        if how == _DESCRIPTOR:
            numbers = _descriptor(name, parameter, next(metas, None), given[names.index(parameter)])
        at = end + -end % _BYTES[how][0]
        packed += struct.pack("7i", how, at, *numbers)
        sizes += _BYTES[how]
        end = at + sum(_BYTES[how])
    if (known := enqueue.native().parameters(compiled.function)) != sizes:
        raise Unusable(f"{name}: parameters of {known} bytes, {sizes} expected")
    return Layout(itemgetter(*picked), end, packed)


def _way(name: str, parameter: str, kind: str) -> int:
    if kind.startswith("tensordesc"):
        return _DESCRIPTOR
    if kind.startswith("*") or kind in _ADDRESSES:
        return _ADDRESS
    if kind in _WORDS:
        return _WORD
    raise Unusable(f"{name} takes {parameter} as {kind}")


def _descriptor(name: str, parameter: str, meta: Any, given: Any) -> tuple[int, ...]:
    """Type, bytes of an element, swizzle and block of a matrix's descriptor."""
    if meta is None:
        raise Unusable(f"{name} takes {parameter} in pieces")
    kind = _TYPES.get(meta["elem_type"], meta["elem_type"])
    numbers = kind, meta["elem_size"], meta["swizzle"], *meta["block_size"]
    ours = enqueue.native().descriptor(struct.pack("7i", _DESCRIPTOR, 0, *numbers), *_COMPARED)
    made = triton_private.described(given.like(*_COMPARED), meta)[0]
    if ours != triton_private.bytes_of(made):
        raise Unusable(f"{name}: this Triton makes the descriptor of {parameter} in another way")
    return numbers


def arguments(
    compiled: Any, layout: Layout, grid: tuple[int, ...], given: Sequence[Any],
    scratch: Operand | None,
) -> tuple[Any, ...]:  # fmt: skip
    """What `List.launch` takes behind the stream. `given` are the kernel's parameters, as a step
    has them.
    """
    values = [one if type(one) in _PLAIN else one.operand for one in layout.pick(given)]
    warps, _, shared = compiled.packed_metadata[:3]
    return (
        compiled.function, (*grid, 1, 1)[:3], 32 * warps, shared, layout.size, layout.parameters,
        [*values, scratch or 0, 0],
    )  # fmt: skip
