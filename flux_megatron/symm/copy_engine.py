"""Who moves bytes beside the GEMM: the GPU's copy engine, or on CPU the calling thread.

Both keep the order "data, then its signal". On CUDA pushes run on a stream of their own; `fork`
orders it after the caller's stream and `join` orders the caller's stream after it, so that a call
leaves no work unjoined. In a capture both streams go into the graph.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flux_megatron.symm.signals import as_int32


class Push(NamedTuple):
    """Bytes from `offset` of a source on to an address, and the address of their signal."""

    destination: int
    offset: int
    size_bytes: int
    signal: int


class Delivery(NamedTuple):
    """What to push when the int32 at `counter`, of this GPU, has come to `tiles`."""

    counter: int
    tiles: int
    push: Push


class CopyEngine(ABC):
    """Copies and signals in the order in which they are asked for."""

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

    @abstractmethod
    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Bytes from one address to another. The memory must live until the join."""

    @abstractmethod
    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        """The same in the caller's stream."""

    @abstractmethod
    def write(self, address: int, word: int) -> None:
        """An int32, after everything copied before."""

    @abstractmethod
    def wait_count(self, counter: int, count: int) -> None:
        """What is pushed from now on comes after the int32 at `counter` has reached `count`.

        For a kernel of this GPU that counts whatever other ranks do: nothing bounds this wait.
        """

    @abstractmethod
    def clear(self, counters: tuple[int, ...]) -> None:
        """Set the int32 at these addresses to 0."""

    def push(self, destination: Tensor, source: Tensor) -> None:
        """destination <- source: same shape and dtype, both contiguous."""
        self.copy(destination.data_ptr(), source.data_ptr(), source.nbytes)

    def signal(self, pad: Tensor, slot: int, epoch: int) -> None:
        """Announce to the owner of `pad` that everything pushed before has arrived."""
        self.write(pad.data_ptr() + slot * pad.element_size(), as_int32(epoch))

    def send(self, pushes: Sequence[Push], source: int, epoch: int) -> None:
        """Pushes that were worked out before, from the address `source`, each with its signal."""
        word = as_int32(epoch)
        for push in pushes:
            self.copy(push.destination, source + push.offset, push.size_bytes)
            self.write(push.signal, word)

    def deliver(self, deliveries: tuple[Delivery, ...], source: int, epoch: int) -> None:
        """One after another, each when it is complete; then their counters are 0 again."""
        for delivery in deliveries:
            self.wait_count(delivery.counter, delivery.tiles)  # wait [D]
            self.send((delivery.push,), source, epoch)
        self.clear(tuple(delivery.counter for delivery in deliveries))


class CpuCopyEngine(CopyEngine):
    """Copies at once. x86-64 keeps stores in order, so a signal never overtakes its data."""

    def current(self) -> int:
        return 0

    def order(self, later: int, earlier: int) -> None: ...

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)

    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        self.copy(destination, source, size_bytes)

    def write(self, address: int, word: int) -> None:
        ctypes.c_int32.from_address(address).value = word

    def wait_count(self, counter: int, count: int) -> None:
        seen = ctypes.c_int32.from_address(counter).value
        assert seen >= count, f"kernels have returned, but counted {seen} of {count}"

    def clear(self, counters: tuple[int, ...]) -> None:
        for counter in counters:
            self.write(counter, 0)


class CudaCopyEngine(CopyEngine):
    """Pushes over NVLink by copy engine; the signal is a stream write that follows in the same
    stream. The driver's own calls: torch's cost the host several times as much.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._index = device.index
        self._owner = torch.cuda.Stream(device, priority=-1)
        self._stream = driver.CUstream(self._owner.cuda_stream)
        with torch.cuda.device(device):
            error, self._event = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._check("cuEventCreate", error)
        self._lock = threading.Lock()  # an event is recorded and awaited by one thread at a time

    def current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)

    def capture(self, stream: int) -> int:
        if stream == self.current() and not torch.cuda.is_current_stream_capturing():
            return 0  # the driver's own call costs ten times as much
        error, status, number, *_ = self._driver.cuStreamGetCaptureInfo(stream)
        self._check("cuStreamGetCaptureInfo", error)
        active = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(number) if status == active else 0

    def order(self, later: int, earlier: int) -> None:
        with self._lock:
            (error,) = self._driver.cuEventRecord(self._event, earlier)
            self._check("cuEventRecord", error)
            (error,) = self._driver.cuStreamWaitEvent(later, self._event, 0)
            self._check("cuStreamWaitEvent", error)

    def fork(self) -> None:
        self.order(self._stream, self.current())

    def join(self) -> None:
        self.order(self.current(), self._stream)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        (error,) = self._driver.cuMemcpyDtoDAsync(destination, source, size_bytes, self._stream)
        self._check("cuMemcpyDtoDAsync", error)

    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        (error,) = self._driver.cuMemcpyDtoDAsync(destination, source, size_bytes, self.current())
        self._check("cuMemcpyDtoDAsync", error)

    def wait_count(self, counter: int, count: int) -> None:
        # flags 0: until the difference of the two, as a signed number, is at least 0
        (error,) = self._driver.cuStreamWaitValue32(self._stream, counter, count, 0)
        self._check("cuStreamWaitValue32", error)

    def clear(self, counters: tuple[int, ...]) -> None:
        self._operate([self._writing(counter, 0) for counter in counters])

    def deliver(self, deliveries: tuple[Delivery, ...], source: int, epoch: int) -> None:
        """A signal and what follows it, the next wait or the end, are one call to the driver."""
        word = as_int32(epoch) % 2**32
        with self._lock:  # the operations are kept and changed
            first, *_ = deliveries
            self.wait_count(first.counter, first.tiles)  # wait [D]
            for push, operations in self._chain(deliveries):
                self.copy(push.destination, source + push.offset, push.size_bytes)
                operations[0].writeValue.value = word
                self._operate(operations)

    @lru_cache(maxsize=256)  # noqa: B019, there is one engine a device, for good
    def _chain(self, deliveries: tuple[Delivery, ...]) -> list[tuple[Push, list[Any]]]:
        ends = [self._writing(delivery.counter, 0) for delivery in deliveries]
        after = [[self._waiting(later.counter, later.tiles)] for later in deliveries[1:]]
        return [
            (delivery.push, [self._writing(delivery.push.signal, 0), *operations])
            for delivery, operations in zip(deliveries, [*after, ends], strict=True)
        ]

    def _operate(self, operations: list[Any]) -> None:
        (error,) = self._driver.cuStreamBatchMemOp(self._stream, len(operations), operations, 0)
        self._check("cuStreamBatchMemOp", error)

    def _writing(self, address: int, word: int) -> Any:
        operation = self._driver.CUstreamBatchMemOpParams()
        kind = self._driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        operation.writeValue.operation = kind
        operation.writeValue.address = address
        operation.writeValue.value = word
        return operation

    def _waiting(self, counter: int, count: int) -> Any:
        operation = self._driver.CUstreamBatchMemOpParams()
        kind = self._driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        operation.waitValue.operation = kind
        operation.waitValue.address = counter
        operation.waitValue.value = count
        operation.waitValue.flags = 0  # until the difference of the two is at least 0
        return operation

    def write(self, address: int, word: int) -> None:
        # flags 0: the write waits for, and is ordered after, all earlier writes of this stream
        (error,) = self._driver.cuStreamWriteValue32(self._stream, address, word % 2**32, 0)
        self._check("cuStreamWriteValue32", error)

    def _check(self, call: str, error: object) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{call} failed: {error}")


@cache
def copy_engine(device: torch.device) -> CopyEngine:
    """The copy engine of a device: one stream of pushes for the whole process."""
    return CudaCopyEngine(device) if device.type == "cuda" else CpuCopyEngine()
