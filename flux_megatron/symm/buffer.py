"""One symmetric allocation: the same number of bytes on every rank, each mapped by all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.recent import Recent

_MAX_VIEWS = 1024  # a call needs several, and they are slow to make


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
    _views: Recent[tuple[Any, ...], Tensor] = field(
        default_factory=partial(Recent, _MAX_VIEWS), repr=False, compare=False
    )

    @property
    def size_bytes(self) -> int:
        return self.shards[self.rank].numel()

    def view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Rank `rank`'s bytes from `offset_bytes` on as a contiguous tensor."""
        key = (rank, shape, dtype, offset_bytes)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._new_view(*key)
        return view

    @lasting()
    def _new_view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int
    ) -> Tensor:
        end = offset_bytes + math.prod(shape) * dtype.itemsize
        assert end <= self.size_bytes, f"view ends at byte {end} of {self.size_bytes}"
        return self.shards[rank][offset_bytes:end].view(dtype).view(shape)
