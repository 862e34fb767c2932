"""One symmetric allocation: the same number of bytes on every rank, each mapped by all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SymmetricBuffer:
    """`shards[r]` is rank r's memory (uint8 [size_bytes]) as this process sees it.

    `pointers` (int64 [R], on the device) holds the same addresses for kernels. `keep_alive` owns
    the mappings.
    """

    rank: int
    shards: tuple[Tensor, ...]
    pointers: Tensor
    keep_alive: object

    @property
    def size_bytes(self) -> int:
        return self.shards[self.rank].numel()

    def view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Rank `rank`'s bytes from `offset_bytes` on as a contiguous tensor."""
        end = offset_bytes + math.prod(shape) * dtype.itemsize
        assert end <= self.size_bytes, f"view ends at byte {end} of {self.size_bytes}"
        return self.shards[rank][offset_bytes:end].view(dtype).view(shape)
