"""One symmetric allocation: the same number of bytes on every rank, each mapped by all; and the
regions of it that calls use.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.lru_cache import LRUCache


@dataclass(frozen=True)
class SymmetricBuffer:
    """`shards[r]` is rank r's memory (uint8 [size_bytes]) as this process sees it.

    `pointers` (int64 [R], on the device) holds the same addresses for kernels. `keep_alive` owns
    the mappings. Where there is a `mailbox` (`symm.mailbox`), other ranks write this one's there.
    """

    rank: int
    shards: tuple[Tensor, ...]
    pointers: Tensor
    keep_alive: object
    mailbox: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return self.shards[self.rank].numel()

    @property
    def own(self) -> Tensor:
        """Where other ranks write this one's."""
        return self.shards[self.rank] if self.mailbox is None else self.mailbox

    def view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Rank `rank`'s bytes from `offset_bytes` on as a contiguous tensor."""
        end = offset_bytes + math.prod(shape) * dtype.itemsize
        assert end <= self.size_bytes, f"view ends at byte {end} of {self.size_bytes}"
        return self.shards[rank][offset_bytes:end].view(dtype).view(shape)


@dataclass(frozen=True, eq=False)
class Region:
    """What one call at a time uses: the same bytes of each rank's buffer, and the signals for them.

    `pointers` and `pad_pointers` are int64 [R] on the device: the addresses of all ranks' regions
    and pads. `entries`, int32 [1], is this rank's count of captured calls, None in the regions of
    eager calls. `fixed` are tensors for calls, in the order of their channel's `FIXED`. Other ranks
    write this one's signals in `own_pad`.
    """

    rank: int
    world_size: int
    size_bytes: int
    pointers: Tensor
    pads: tuple[Tensor, ...]
    pad_pointers: Tensor
    entries: Tensor | None
    fixed: tuple[Tensor, ...]
    own_pad: Tensor
    _data: SymmetricBuffer
    _offset_bytes: int
    _prepared: LRUCache[Hashable, Any] = field(default_factory=LRUCache)

    def view(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Rank `rank`'s region, or what is `offset_bytes` behind its beginning, as a tensor."""
        return self._data.view(rank, shape, dtype, self._offset_bytes + offset_bytes)

    @property
    def mailbox(self) -> int:
        """The address of what others have written for this rank, 0 where that is its region."""
        box = self._data.mailbox
        return 0 if box is None else box.data_ptr() + self._offset_bytes

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The numbers that programs of calls know by their places in it: the addresses of all
        ranks' regions and signals, the region's size in 64-bit words, the addresses of `fixed`.
        """
        regions = (shard.data_ptr() + self._offset_bytes for shard in self._data.shards)
        pads = (pad.data_ptr() for pad in self.pads)
        fixed = (one.data_ptr() for one in self.fixed)
        return (*regions, *pads, self.size_bytes // 8, *fixed)

    @cached_property
    def table(self) -> bytes:
        """`words` as C takes them."""
        return struct.pack(f"{len(self.words)}Q", *self.words)

    def prepared(self, make: Callable[..., Any], *arguments: Hashable) -> Any:
        """`make(region, *arguments)`, cached: the addresses of a region do not change."""
        key = (make, arguments)
        prepared = self._prepared.get(key)
        if prepared is None:
            with lasting():
                prepared = self._prepared[key] = make(self, *arguments)
        return prepared
