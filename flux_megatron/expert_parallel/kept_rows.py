"""What experts keep of their rows for backward, at the size of the rows that came.

No host knows how many rows come, so buffers are of the most that could: as many times what comes
on average as there are ranks, where each has as many experts as a token chooses. So their number
follows the layer to the host, and when it is there, the layers behind have begun and what was kept
is copied to memory of its size. In backward the rows lie in a whole buffer again, of one layer at a
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor

from flux_megatron.symm.device import capturing

# Buffers more than this many times as large as the rows that come on average are copied: with four
# ranks the memory may be there, and each kept row is copied twice.
TIMES = 4
MOST = 2  # layers that keep whole buffers; the host waits for the one before them
_open: deque[Kept] = deque()


class Kept:
    """What one layer keeps: tensors of `capacity` rows, of which the first ones count."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.packed: WeakSet[_Packed] = WeakSet()  # what autograd has let go needs no copy
        self._event: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if tensor.dim() == 0 or len(tensor) != self.capacity:
            return tensor
        packed = _Packed(self.capacity, tensor)
        self.packed.add(packed)
        return packed

    def counted(self, received: Tensor) -> None:
        """`received` int32 [..., E] counts the rows that came, on the device."""
        if not self.packed:  # no gradient is wanted
            return
        self._count = received.sum()
        if received.is_cuda:
            there = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._count = there.copy_(self._count, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        _open.append(self)

    def is_known(self) -> bool:
        return self._event is None or self._event.query()

    def shrink(self) -> None:
        """Copy what is kept, when its number is known."""
        if self._event is not None:
            self._event.synchronize()
        for one in self.packed:
            one.shrink(int(self._count))


class _Packed:
    """A tensor that autograd keeps, whole until it is copied."""

    def __init__(self, capacity: int, tensor: Tensor) -> None:
        self.capacity, self.tensor = capacity, tensor

    def shrink(self, rows: int) -> None:
        if self.tensor.untyped_storage().size():  # else Megatron makes it again for backward
            if self.tensor.is_cuda:  # the layer may have been on another stream, in a warm-up
                self.tensor.record_stream(torch.cuda.current_stream(self.tensor.device))
            self.tensor = self.tensor[:rows].clone()

    def whole(self) -> Tensor:
        if len(self.tensor) == self.capacity:
            return self.tensor
        whole = self.tensor.new_empty(self.capacity, *self.tensor.shape[1:])
        whole[: len(self.tensor)] = self.tensor
        return whole


def _unpack(kept: Tensor | _Packed) -> Tensor:
    return kept.whole() if isinstance(kept, _Packed) else kept


@contextmanager
def _keeping(capacity: int) -> Iterator[Kept]:
    while _open and (len(_open) >= MOST or _open[0].is_known()):
        _open.popleft().shrink()
    kept = Kept(capacity)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, _unpack):
        yield kept


def keeping(capacity: int, on_average: int, others: int, device: torch.device) -> Context[Kept]:
    """Inside, what autograd keeps of `capacity` rows is of the size of the rows that came, if
    these are few `on_average`. `Kept.counted` comes last.

    What else autograd keeps has `others` rows at most: counts of R ranks, weights and biases of E
    experts. So few rows are not told from them, and take no memory that counts.
    """
    if capacity <= max(TIMES * on_average, others) or capturing(device):
        return nullcontext(Kept(capacity))  # which packs nothing
    return _keeping(capacity)
