"""What emulated kernels hold: pointers, descriptors, shared memory, mbarriers, sums."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from memory_checker import OutOfBounds
from torch import Tensor


class Misuse(AssertionError):
    """Of an mbarrier: on a GPU nobody knows what happens then."""


class PointerType(NamedTuple):
    element: torch.dtype


class Pointer:
    """Elements of the flat tensor `memory` from `at` on; `at` is a number or a tensor of them."""

    def __init__(self, memory: Tensor, at=0) -> None:
        self.memory, self.at = memory, at
        self.dtype = PointerType(memory.dtype)

    def __add__(self, offset) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def to(self, kind: PointerType) -> Pointer:
        """To elements of another dtype at the same address."""
        if kind == self.dtype:
            return self
        at = self.at * self.memory.element_size()
        assert at % kind.element.itemsize == 0, f"byte {at} given for {kind.element}"
        return Pointer(self.memory.view(kind.element), at // kind.element.itemsize)

    @property
    def address(self) -> int:
        self.check()
        return self.memory.data_ptr() + self.at * self.memory.element_size()

    def check(self, mask: Tensor | None = None) -> None:
        at = torch.as_tensor(self.at)
        at = at if mask is None else at[torch.broadcast_to(mask, at.shape)]
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < self.memory.numel():
            span = f"elements {int(at.min())} to {int(at.max())}"
            raise OutOfBounds(f"{span} of {self.memory.numel()} of {self.memory.dtype}")


class Descriptor:
    """A TMA descriptor of a matrix: loads are 0 beyond its edges, stores end there. A tile begins
    in its rows. Its rows are swizzled in halves, where a GPU's are in 128 bytes.
    """

    def __init__(self, matrix: Tensor, block: Sequence[int]) -> None:
        self.matrix, self.dtype = matrix, matrix.dtype
        nbytes = math.prod(block) * matrix.element_size()
        self.layout = SimpleNamespace(swizzle_byte_width=nbytes // block[0] // 2)
        self.block_type = SimpleNamespace(shape=list(block), nbytes=nbytes)

    def tile(self, place: Sequence[int]) -> tuple[Tensor, tuple[slice, slice]]:
        """What lies in the matrix of the tile at `place`, and where that is in the tile."""
        (row, column), (rows, columns) = place, self.block_type.shape
        if row < 0 or column < 0 or row >= len(self.matrix):
            raise OutOfBounds(f"a tile at {place} of a matrix {list(self.matrix.shape)}")
        inside = self.matrix[row : row + rows, column : column + columns]
        return inside, (slice(0, inside.shape[0]), slice(0, inside.shape[1]))


class Shared:
    """A buffer in shared memory, or the stages of a ring of them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.shape, self.dtype = memory, list(memory.shape), memory.dtype

    def index(self, stage: int) -> Shared:
        return Shared(self.memory[stage])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.memory[start : start + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        """The same bytes, as many as the shape has. Slices of rows lie one after another."""
        if len(shape) > self.memory.dim():
            count, rows, columns = shape
            return Shared(self.memory.view(rows, count, columns).transpose(0, 1))
        count = math.prod(shape) * dtype.itemsize
        return Shared(self.memory.view(-1).view(torch.uint8)[:count].view(dtype).view(*shape))

    def store(self, value: Tensor) -> None:
        self.memory.copy_(torch.as_tensor(value))

    def load(self, layout: object = None) -> Tensor:
        return self.memory.clone()


class Barrier:
    """An mbarrier: a phase ends with the last arrival, once all announced bytes have come."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.missing = self.bytes = self.phases = 0

    def invalidate(self) -> None:
        if self.missing != self.count or self.bytes:
            raise Misuse("an mbarrier is invalidated in the middle of a phase")
        self.__init__()

    def arrive(self, count: int = 0, size_bytes: int = 0) -> None:
        self.missing -= count
        self.bytes += size_bytes
        if self.count is None or self.missing < 0:
            raise Misuse(f"an mbarrier of count {self.count} has {-self.missing} arrivals too many")
        if not self.missing and not self.bytes:
            self.phases += 1
            self.missing = self.count


class Barriers:
    """Several of them; as an operand the first one."""

    def __init__(self, count: int) -> None:
        self._barriers = [Barrier() for _ in range(count)]
        self.shape = [count, 1]

    def index(self, place: int) -> Barrier:
        return self._barriers[place]


class Accumulator:
    """fp32 sums, and the MMAs that are still to be added to them, by their numbers."""

    def __init__(self, sums: Tensor, pending: tuple[tuple[int, Shared, Shared], ...] = ()) -> None:
        self.sums, self.pending = sums, pending

    def wait(self, done: int) -> Accumulator | Tensor:
        """What it is when the first `done` MMAs of its partition are done."""
        sums, left = self.sums, self.pending
        while left and left[0][0] < done:
            (_, a, b), *left = left
            sums = sums + a.memory.float() @ b.memory.float()
        return Accumulator(sums, tuple(left)) if left else sums

    def __radd__(self, other: object) -> None:
        raise Misuse("sums are read before their MMAs are done")


class Transfers:
    """The asynchronous copies of a partition in one direction, in their order."""

    def __init__(self, name: str) -> None:
        self.name, self.steps = name, deque()
        self.issued = self.read = self.written = 0


class MBarrierLayout: ...
