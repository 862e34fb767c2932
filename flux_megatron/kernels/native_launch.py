"""A launch of a compiled kernel as its driver call, for lists of such calls (`symm.recording`).

The parameters of a kernel that Triton has compiled are those of its signature that are no
constexprs, a host descriptor being the hardware's and then its sizes and strides; behind them come
two addresses of scratch memory. The driver is asked for the sizes of all: where they are others,
or this Triton makes descriptors in another way, there is no such launch, and the reason is given.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from flux_megatron.symm import enqueue
from flux_megatron.symm.recording import EPOCH, Launch, Recording, Unrecordable

_SIZES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
_MAP_BYTES = 128  # of a descriptor, which must lie at a multiple of that
_WORD, _ADDRESS, _MAP = range(3)  # how words go into parameters, as in enqueue.c
_NUMBERS_OF_CALLS = ("epoch", "gather_epoch")


class _Parameters:
    """The memory of a kernel's parameters, and where words go."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.memory = bytearray()
        self.places: list[int] = []
        self.sizes: list[int] = []
        self.patches: list[tuple[int, int, enqueue.Word]] = []

    def add(self, data: bytes, word: enqueue.Word | None = None, how: int = _WORD) -> None:
        self.memory += bytes(-len(self.memory) % len(data))
        if word is not None and word.register:
            self.patches.append((how, len(self.memory), word))
        self.places.append(len(self.memory))
        self.sizes.append(len(data))
        self.memory += data

    def add_number(self, value: int, size: int, word: enqueue.Word | None = None) -> None:
        self.add((value % (1 << 8 * size)).to_bytes(size, "little"), word)

    def add_address(self, address: int) -> None:
        self.add(address.to_bytes(8, "little"), self._recording.address(address), _ADDRESS)

    def add_descriptor(self, descriptor: Any, meta: Any) -> None:
        word = self._recording.address(descriptor.base.data_ptr())
        made, *sizes = _expanded(descriptor, meta)
        self.add(_bytes_of(made), word, _MAP)
        dimensions = len(sizes) // 2
        for number, value in enumerate(sizes):
            self.add_number(value, 4 if number < dimensions else 8)


def launch(
    name: str, compiled: Any, grid: tuple[int, ...], names: Sequence[str], values: Sequence[Any],
    recording: Recording, scratch: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """The launch that Triton has made of `values`; `names` are theirs. `Unrecordable`: why not."""
    metadata = compiled.metadata
    warps, ctas, shared = compiled.packed_metadata[:3]
    cooperative = metadata.launch_cooperative_grid or metadata.launch_pdl
    if ctas != 1 or cooperative or metadata.profile_scratch_size:
        raise Unrecordable(f"{name} needs a launch of another kind")
    parameters, metas = (
        _Parameters(recording),
        iter(getattr(metadata, "tensordesc_meta", None) or ()),
    )
    for parameter, value in zip(names, values, strict=True):
        kind = compiled.src.signature[parameter]
        if kind.startswith("tensordesc"):
            if (meta := next(metas, None)) is None:
                raise Unrecordable(f"{name} takes {parameter} in pieces")
            parameters.add_descriptor(value, meta)
        elif kind.startswith("*"):
            parameters.add_address(value)
        elif kind in _SIZES:
            word = EPOCH if parameter in _NUMBERS_OF_CALLS else None
            parameters.add_number(value, _SIZES[kind], word)
        elif kind != "constexpr":
            raise Unrecordable(f"{name} takes {parameter} as {kind}")
    parameters.add_address(0 if scratch is None else scratch.data_ptr())
    parameters.add_address(0)
    if (known := enqueue.native().parameters(compiled.function)) != parameters.sizes:
        raise Unrecordable(f"{name}: parameters of {known} bytes, {parameters.sizes} expected")
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(name, (
        compiled.function, (x, y, z), 32 * warps, shared, bytes(parameters.memory),
        tuple(parameters.places), tuple(parameters.patches),
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
    return ctypes.string_at(behind - _MAP_BYTES, _MAP_BYTES)
