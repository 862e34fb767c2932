"""A channel whose data carries its flags, and whose calls are counted on the device.

Each 64-bit word of its memory holds 32 bits of data and the epoch of the call that stored them, so
there are no signals. Kernels read and advance the epoch themselves: a replay of a CUDA graph is a
call like any other, uses the same two halves, and meets nobody when it begins.
`docs/memory_model.md` has the argument.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.symm import signals
from flux_megatron.symm.buffer import Region
from flux_megatron.symm.channel import Call, Channel
from flux_megatron.symm.status import Status


class WordChannel(Channel):
    """Half h of a call's memory lies h * `region_bytes` behind `Region.pointers`.

    `epochs`, int32 [1], is the number of the last call that has ended on this rank. `work`, int32
    [2 * WORK_WORDS], is the tile scheduler of the calls of either half. `arrivals`, int32 [2],
    counts pieces of gathered rows and the CTAs that have left a call. Collective constructor.
    """

    FIXED: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        **Channel.FIXED, "epochs": (7, torch.int32), "work": (8, torch.int32),
        "arrivals": (9, torch.int32),
    }  # fmt: skip

    def __init__(
        self, group: ProcessGroup, device: torch.device, status: Status, mailboxes: bool = False
    ) -> None:
        super().__init__(group, device, status, mailboxes)
        self.epochs = torch.zeros(1, dtype=torch.int32, device=device)
        self.work = torch.zeros(2 * signals.WORK_WORDS, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(2, dtype=torch.int32, device=device)
        self._mine: Tensor | None = None  # the words that this rank awaits
        self._in_graphs = False  # whether a graph holds the addresses of these words
        self._name(self.arrivals, "the gathered rows of this rank".format)

    @property
    def held_by_graph(self) -> bool:
        return self._in_graphs or super().held_by_graph

    def _counters(self) -> tuple[Tensor, ...]:
        return *super()._counters(), self.epochs, self.work, self.arrivals

    def begin(self, captured: bool) -> Call:
        """Open the next call. Its `epoch` is the kernel's to know; here it is 0, and the channel's
        counts eager calls alone.
        """
        assert not self.open, "a channel has one open call"
        self.open = True
        self._in_graphs |= captured
        self.epoch += not captured
        return Call(0, self._status.words, self._regions[0], self)

    def poison(self, region: Region) -> None:
        """Nothing: words of other epochs are never taken for data."""

    def grow(self, size_bytes: int) -> None:
        """Take new memory, of epoch 0, whose halves have so many bytes. Collective."""
        if self._in_graphs:
            self._outgrown += self._regions
        elif self._mine is not None:
            self._forget(self._mine)
        self._in_graphs = False
        super().grow(size_bytes)
        mine = self._regions[0].view(self._rank, (self.region_bytes,), torch.uint8)
        self._name(mine, "words of rank {}".format)
        self._mine = mine
