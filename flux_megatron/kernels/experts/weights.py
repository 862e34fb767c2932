"""Where the matrices of experts lie: one distance apart in one storage, in either order.

Megatron keeps one parameter an expert. Where these lie so, they are one strided tensor and nobody
copies them. An optimizer's buffer has them in reverse, with other parameters between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """`matrices` [E, N, K] as they lie in memory: rows of K elements one behind the other, whole
    rows between two experts. With `reverse` the first expert's lie last.
    """

    matrices: Tensor
    reverse: bool = False

    @property
    def pitch(self) -> int:
        """Rows from an expert's matrix to the next expert's; negative in reverse."""
        experts, N, _ = self.matrices.shape
        rows = self.matrices.stride(0) // self.matrices.stride(1) if experts > 1 else N
        return -rows if self.reverse else rows

    @property
    def first(self) -> int:
        """The row at which the first expert's matrix begins."""
        return -self.pitch * (len(self.matrices) - 1) if self.reverse else 0

    def columns(self, layout: str) -> int:
        """Of the product of rows and a matrix."""
        return self.matrices.shape[1 if layout == "nt" else 2]

    def of(self, expert: int) -> Tensor:
        """The matrix [N, K] of an expert."""
        return self.matrices[len(self.matrices) - 1 - expert if self.reverse else expert]

    def rows(self) -> Tensor:
        """All rows [rows, K] from the first in memory to the last, others between them included."""
        experts, N, K = self.matrices.shape
        return self.matrices.as_strided(((experts - 1) * abs(self.pitch) + N, K), (K, 1))


def lie_in_rows(matrices: Tensor) -> bool:
    """Whether [E, N, K] is what `ExpertWeights` takes."""
    experts, N, K = matrices.shape
    distance = matrices.stride(0)
    return matrices[0].is_contiguous() and (
        experts == 1 or (distance >= N * K and distance % K == 0)
    )


def as_one(tensors: Sequence[Tensor]) -> ExpertWeights | None:
    """Equal contiguous matrices [N, K], one an expert, as one view of their storage, without
    autograd; None unless they lie one distance of whole rows apart.
    """
    first = tensors[0].detach()
    addresses = [*map(Tensor.data_ptr, tensors)]
    size_bytes, row_bytes = first.nbytes, first.shape[1] * first.itemsize
    distance = addresses[1] - addresses[0] if len(tensors) > 1 else size_bytes
    if abs(distance) < size_bytes or distance % row_bytes:
        return None
    if addresses != [addresses[0] + number * distance for number in range(len(tensors))]:
        return None
    if not all(map(Tensor.is_contiguous, tensors)):
        return None
    lowest = tensors[-1].detach() if distance < 0 else first
    size, strides = (len(tensors), *first.shape), (abs(distance) // first.itemsize, *first.stride())
    end_bytes = lowest.storage_offset() * first.itemsize
    end_bytes += abs(distance) * (len(tensors) - 1) + size_bytes
    if end_bytes > lowest.untyped_storage().nbytes():  # neighbours by chance, in other storages
        return None
    return ExpertWeights(lowest.as_strided(size, strides), distance < 0)
