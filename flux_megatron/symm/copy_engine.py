"""The copies beside the GEMM: by the GPU's copy engine, or on CPU by the calling thread.

Both keep the order "data, then its signal". On CUDA pushes run on a stream of their own. `fork`
orders it after the caller's stream, `join` orders the caller's stream after it, and every call
joins what it has forked. In a capture both streams go into the graph.

Everything that the calls of a device enqueue has one order, whatever streams the caller uses.
Kernels of a call may fill the GPU until a signal comes, and one copy-engine stream serves all
channels and groups. Calls on unordered streams could deadlock: a kernel of the first call waits for
SMs that a kernel of the second holds, and that one waits for pushes that stand behind a gated push
of the first. So everything that a call enqueues comes after all that earlier calls have enqueued,
as if the caller had one stream. A caller with one stream pays a comparison for this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from flux_megatron import errors
from flux_megatron.symm.enqueue import Streams
from flux_megatron.symm.signals import as_int32


class CopyEngine(ABC):
    """Copies and signals, in the order of the calls to its methods."""

    runs_lists = False  # whether C may enqueue what its methods do (`symm.enqueue`)
    list_streams: Streams  # of such lists
    index: int  # of the GPU
    _last: int | None = None  # the stream that an eager call was last enqueued on
    _captured = (0, 0)  # capture, and the last stream in it

    def follow(self) -> None:
        """What the current stream gets from now on comes after all that calls have enqueued.

        A graph orders its own calls; the caller's streams order its replays. `WorkspaceError` for
        an eager call after one whose stream is being captured: an event would capture it too.
        """
        current = self.current()
        if capture := self.capture(current):
            if self._captured[0] == capture and self._captured[1] != current:
                self.order(current, self._captured[1])
            self._captured = (capture, current)
        elif current != self._last:
            if self._last is not None:
                if self.capture(self._last):
                    raise errors.WorkspaceError(
                        "an eager call on another stream than the last call's, which is being "
                        "captured: make it before or after the capture"
                    )
                self.order(current, self._last)
            self._last = current

    @abstractmethod
    def current(self) -> int:
        """The handle of the caller's stream."""

    def capture(self, stream: int) -> int:
        """The number of the capture that the stream is in, 0 where it is in none."""
        return 0

    @abstractmethod
    def order(self, later: int, earlier: int) -> None:
        """What `later` gets from now on comes after what `earlier` holds now."""

    @abstractmethod
    def fork(self) -> None:
        """What is pushed from now on comes after what the caller's stream holds now."""

    @abstractmethod
    def join(self) -> None:
        """What the caller's stream gets from now on comes after what has been pushed."""

    def hold(self, *tensors: Tensor) -> None:  # noqa: B027, a CPU has no streams
        """For tensors that pushes or a joined stream have used, after the join: where another
        stream than the caller's made them, their memory is nobody else's before the caller's stream
        has come so far.
        """

    def stream(self) -> AbstractContextManager[object]:
        """What torch enqueues within comes between what is pushed before and after."""
        return nullcontext()

    @abstractmethod
    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Bytes from one address to another. The memory must live until the join."""

    @abstractmethod
    def copy_rows(
        self, destination: int, source: int, size_bytes: int, rows: int, pitch_bytes: int
    ) -> None:
        """The same of so many rows, which begin `pitch_bytes` apart on both sides."""

    @abstractmethod
    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        """The same in the caller's stream."""

    @abstractmethod
    def write(self, address: int, word: int) -> None:
        """An int32, after everything copied before."""

    @abstractmethod
    def wait_count(self, counter: int, count: int) -> None:
        """What is pushed from now on comes after the int32 at `counter` has reached `count`.

        Nothing bounds this wait: the kernel of this GPU counts whatever other ranks do, or waits
        for them with a bound.
        """

    def signal(self, address: int, epoch: int) -> None:
        """The epoch as the int32 at an address, after everything copied before."""
        self.write(address, as_int32(epoch))
