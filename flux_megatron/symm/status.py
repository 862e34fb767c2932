"""The first wait of a group that ran out of time: a kernel writes it, the host reads it.

A group has one record, for all its channels, and it ends with the group. After the first late wait
every other wait of the group gives up soon, and results are not to be trusted. The record lies in
pinned memory, so the host can read it while kernels run, and end their waits by it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.symm import signals
from flux_megatron.symm.groups import timeout_s
from flux_megatron.symm.lasting import lasting

# A GPU looks by an atomic add of 0, which over PCIe may write back an old 0 behind the host's word:
# the host looks again.
_LOOKS, _LOOK_S = 20, 1e-3


class _Named(NamedTuple):
    waiter: str
    awaited: Callable[[int], str]
    bound_s: Callable[[], float]


class Status:
    """The record of a group on a device. Kernels that wait take `words`, int32 [STATUS_WORDS], and
    wait for `limit_s` at most.
    """

    @lasting()
    def __init__(self, device: torch.device, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        cuda = device.type == "cuda"
        self.words = torch.zeros(signals.STATUS_WORDS, dtype=torch.int32, pin_memory=cuda)
        self._record = (ctypes.c_int32 * signals.STATUS_WORDS).from_address(self.words.data_ptr())
        self._pads: dict[int, _Named] = {}
        self._late = self._refused = ""
        self.mismatch = ""  # how another rank's call differs from the one that waits for it

    def bound_s(self, group: ProcessGroup) -> float:
        """Seconds that a wait of the group may take."""
        return min(timeout_s(group), self._limit_s)

    def bound_ns(self, group: ProcessGroup) -> int:
        """The same for kernels."""
        return int(self.bound_s(group) * 1e9)

    def name(
        self, pad: Tensor, waiter: str, awaited: Callable[[int], str], bound_s: Callable[[], float]
    ) -> None:
        """Name the waits for slots of `pad`: who waits, what the slot of a number announces, and
        how long a wait may take.
        """
        self._pads[pad.data_ptr()] = _Named(waiter, awaited, bound_s)

    def forget(self, pad: Tensor) -> None:
        """The memory of `pad` is given back."""
        self._pads.pop(pad.data_ptr(), None)

    @property
    def tripped(self) -> bool:
        """Whether waits give up."""
        return self._record[signals.STATUS_TRIPPED] != 0 or bool(self.mismatch)

    def end_waits(self, mismatch: str) -> None:
        """Have all waits give up, because what they wait for will not come."""
        self.mismatch = self.mismatch or mismatch
        self._give_up()

    def _give_up(self) -> None:
        for _ in range(_LOOKS):
            if not self._record[signals.STATUS_TRIPPED]:
                self._record[signals.STATUS_TRIPPED] = signals.STATUS_MISMATCH
            self._record[signals.STATUS_OVER] = 1
            time.sleep(_LOOK_S)

    def report_late(self, pad: Tensor, slot: int, expected: int, seen: int) -> None:
        """As a kernel whose wait has run out of time; the first report stays."""
        record, address = self._record, pad.data_ptr()
        if record[signals.STATUS_TRIPPED]:
            return
        record[signals.STATUS_SLOT], record[signals.STATUS_SEEN] = slot, seen
        record[signals.STATUS_EXPECTED] = signals.as_int32(expected)
        record[signals.STATUS_PAD_LOW] = signals.as_int32(address)
        record[signals.STATUS_PAD_HIGH] = address >> 32
        record[signals.STATUS_TRIPPED] = signals.STATUS_LATE
        self._give_up()

    def late(self) -> str:
        """Who waited for what, and how long; "" while no wait is late."""
        if self._record[signals.STATUS_TRIPPED] == signals.STATUS_LATE and not self._late:
            named, slot, expected, seen = self._recorded()
            self._late = (
                f"{named.waiter} waited {named.bound_s():g} s for {named.awaited(slot)}: "
                f"epoch {expected} expected, {seen} seen"
            )
        return self._late

    def refused(self) -> str:
        """What a kernel refused to do, on which rank, or nothing."""
        if self._record[signals.STATUS_TRIPPED] == signals.STATUS_REFUSED and not self._refused:
            named, slot, expected, seen = self._recorded()
            self._refused = f"{named.waiter}: {signals.refused(slot, expected, seen)}"
        return self._refused

    def _recorded(self) -> tuple[_Named, int, int, int]:
        low, high, slot, expected, seen = (
            self._record[word]
            for word in (
                signals.STATUS_PAD_LOW, signals.STATUS_PAD_HIGH, signals.STATUS_SLOT,
                signals.STATUS_EXPECTED, signals.STATUS_SEEN,
            )
        )  # fmt: skip
        address = (high << 32) + low % 2**32
        unknown = _Named("a rank", "slot {}".format, lambda: settings.get().timeout_s or math.nan)
        return self._pads.get(address, unknown), slot, expected, seen
