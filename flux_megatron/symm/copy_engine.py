"""Who moves bytes beside the GEMM: the GPU's copy engine, or on CPU the calling thread.

Both keep the order "data, then its signal". On CUDA pushes run on a stream of their own; `fork`
orders it after the caller's stream and `join` orders the caller's stream after it, so that a call
leaves no work unjoined.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flux_megatron.symm.signals import as_int32


class CpuCopyEngine:
    """Copies at once. x86-64 keeps stores in order, so a signal never overtakes its data."""

    def fork(self) -> None: ...

    def push(self, destination: Tensor, source: Tensor) -> None:
        """destination <- source: same shape and dtype, both contiguous."""
        destination.copy_(source)

    def signal(self, pad: Tensor, slot: int, epoch: int) -> None:
        """Announce to the owner of `pad` that everything pushed before has arrived."""
        pad[slot] = as_int32(epoch)

    def join(self) -> None: ...


class CudaCopyEngine:
    """Pushes over NVLink by copy engine; the signal is a stream write that follows in the same
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = device.index  # a stream is looked up faster by index than by device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def fork(self) -> None:
        """What is pushed from now on comes after what the caller's stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def push(self, destination: Tensor, source: Tensor) -> None:
        # the driver's call: Tensor.copy_ in a stream context costs the host more
        (error,) = self._driver.cuMemcpyDtoDAsync(
            destination.data_ptr(), source.data_ptr(), source.nbytes, self._stream.cuda_stream
        )
        self._check("cuMemcpyDtoDAsync", error)

    def signal(self, pad: Tensor, slot: int, epoch: int) -> None:
        address = pad.data_ptr() + slot * pad.element_size()
        # flags 0: the write waits for, and is ordered after, all earlier writes of this stream
        (error,) = self._driver.cuStreamWriteValue32(
            self._stream.cuda_stream, address, as_int32(epoch) % 2**32, 0
        )
        self._check("cuStreamWriteValue32", error)

    def _check(self, call: str, error: object) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{call} failed: {error}")

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@cache
def copy_engine(device: torch.device) -> CpuCopyEngine | CudaCopyEngine:
    """The copy engine of a device: one stream of pushes for the whole process."""
    return CudaCopyEngine(device) if device.type == "cuda" else CpuCopyEngine()
