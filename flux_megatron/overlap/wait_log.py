"""The waits inside the kernels of the last launches, recorded with FLUX_MEGATRON_RECORD_WAITS=1."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron import settings
from flux_megatron.kernels import wait_records
from flux_megatron.kernels.wait_records import Wait
from flux_megatron.symm.lasting import lasting

LAUNCHES = 16  # on each device whose waits are kept


class Launch(NamedTuple):
    """The waits of one launch of `kernel`; `lost` more did not fit into its buffer."""

    kernel: str
    waits: list[Wait]
    lost: int


class _Log:
    """The buffers of a device, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = deque(wait_records.empty_buffers(LAUNCHES, device))
        self.launches: deque[tuple[str, Tensor]] = deque(maxlen=LAUNCHES)

    def next_buffer(self, kernel: str) -> Tensor:
        if len(self.launches) == LAUNCHES:
            self._buffers[0][0].zero_()
        self.launches.append((kernel, self._buffers[0]))
        self._buffers.rotate(-1)
        return self.launches[-1][1]

    def clear(self) -> None:
        self.launches.clear()
        for buffer in self._buffers:
            buffer[0].zero_()


@lru_cache(maxsize=8)
@lasting()
def _log(device: torch.device) -> _Log:
    return _Log(device)


def next_buffer(kernel: str, device: torch.device) -> Tensor | None:
    """The buffer for the waits of the next launch of `kernel`; None if waits are not recorded."""
    return _log(device).next_buffer(kernel) if settings.get().record_waits else None


def recorded(device: torch.device) -> list[Launch]:
    """The last launches on `device`, in order. They must have finished."""
    launches = _log(device).launches
    return [Launch(kernel, *wait_records.read(buffer.cpu())) for kernel, buffer in launches]


def clear(device: torch.device) -> None:
    """Forget all launches."""
    _log(device).clear()
