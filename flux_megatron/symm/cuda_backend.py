"""The copy engines of GPUs."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.enqueue import Streams, always


class _Current:
    """`torch.cuda.stream`, which takes the host 18 us, this 3 (a machine with an H200, 2026-11-30,
    torch 2.11, h200/checks.jsonl).
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, self._device = self._stream, torch.cuda.current_device()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set_current(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_current(*self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


def _set_current(stream_id: int, device_index: int, device_type: int) -> None:
    """Of its device, which becomes the current one."""
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


class CudaCopyEngine(CopyEngine):
    """Pushes over NVLink by copy engine; the signal is a write that follows in the same stream.

    It calls the driver: torch's functions cost the host several times as much.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self.index = device.index
        self._owner = torch.cuda.Stream(device, priority=-1)
        self._stream = driver.CUstream(self._owner.cuda_stream)
        # torch makes the event: the driver would refuse a thread that has not used a GPU yet,
        # as the one of a backward whose first call this is
        self._marker = torch.cuda.Event()
        self._marker.record(self._owner)
        self._event = driver.CUevent(self._marker.cuda_event)
        self._lock = threading.Lock()  # an event is recorded and awaited by one thread at a time
        self._list_marker = torch.cuda.Event()  # lists have another lock
        self._list_marker.record(self._owner)
        own, event = int(self._stream), int(driver.CUevent(self._list_marker.cuda_event))
        self.list_streams = Streams(always(own), always(event))

    def current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

    def capture(self, stream: int) -> int:
        # torch's query gives a new thread the context that the driver's functions need
        here = stream == self.current() and torch.cuda.current_device() == self.index
        if here and not torch.cuda.is_current_stream_capturing():
            return 0  # the driver's query costs ten times as much
        status, number, *_ = self._call("cuStreamGetCaptureInfo", stream)
        active = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(number) if status == active else 0

    def order(self, later: int, earlier: int) -> None:
        with self._lock:
            self._call("cuEventRecord", self._event, earlier)
            self._call("cuStreamWaitEvent", later, self._event, 0)

    def fork(self) -> None:
        self.order(self._stream, self.current())

    def join(self) -> None:
        self.order(self.current(), self._stream)

    def hold(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def stream(self) -> AbstractContextManager[object]:
        return _Current(self._owner)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", destination, source, size_bytes, self._stream)

    def copy_rows(
        self, destination: int, source: int, size_bytes: int, rows: int, pitch_bytes: int
    ) -> None:
        box = self._driver.CUDA_MEMCPY2D()
        memory = self._driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED  # of any GPU
        box.srcMemoryType = box.dstMemoryType = memory
        box.srcDevice, box.dstDevice = source, destination
        box.srcPitch = box.dstPitch = pitch_bytes
        box.WidthInBytes, box.Height = size_bytes, rows
        self._call("cuMemcpy2DAsync", box, self._stream)

    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", destination, source, size_bytes, self.current())

    def wait_count(self, counter: int, count: int) -> None:
        # flags 0: until the difference of the two, as a signed number, is at least 0
        self._call("cuStreamWaitValue32", self._stream, counter, count % 2**32, 0)

    def write(self, address: int, word: int) -> None:
        # flags 0: the write waits for, and is ordered after, all earlier writes of this stream
        self._call("cuStreamWriteValue32", self._stream, address, word % 2**32, 0)

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        error, *given = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {error}")
        return given
