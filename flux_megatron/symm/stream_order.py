"""One order for all that a device's calls enqueue, whatever streams the caller uses.

Kernels of a call may fill the GPU until a signal comes, and one copy-engine stream serves all
channels and groups. Calls on streams without an order between them could wait for each other in a
circle: a kernel of one for SMs that the other's holds, and that one for pushes that stand behind a
gated push of the first. So whatever a call enqueues comes after all that calls have enqueued
before, as if the caller had one stream. On one stream that is so, and costs a comparison.
"""

from __future__ import annotations

from functools import cache

import torch

from flux_megatron import errors
from flux_megatron.symm.copy_engine import CopyEngine, copy_engine


class StreamOrder:
    """The last stream that a call was enqueued on, eagerly and in the capture of a graph."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._last: int | None = None
        self._captured = (0, 0)  # capture, and the last stream in it

    def follow(self) -> None:
        """What the current stream gets from now on comes after all that calls have enqueued.

        A graph orders its own calls; the caller's streams order its replays. `WorkspaceError` for
        an eager call after one whose stream is being captured: an event would capture it too.
        """
        current = self._engine.current()
        if capture := self._engine.capture(current):
            if self._captured[0] == capture and self._captured[1] != current:
                self._engine.order(current, self._captured[1])
            self._captured = (capture, current)
        elif current != self._last:
            if self._last is not None:
                self._order_after_last(current)
            self._last = current

    def _order_after_last(self, current: int) -> None:
        assert self._last is not None
        if self._engine.capture(self._last):
            raise errors.WorkspaceError(
                "an eager call on another stream than the last call's, which is being captured: "
                "make it before or after the capture"
            )
        self._engine.order(current, self._last)


@cache
def stream_order(device: torch.device) -> StreamOrder:
    """The order of a device's calls."""
    return StreamOrder(copy_engine(device))
