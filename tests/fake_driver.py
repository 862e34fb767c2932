"""A driver for tests, compiled from `fake_driver.c`: what comes to its streams is done at once and
noted. `Driver` stands for `cuda.bindings.driver`; lists of driver calls take the library's path.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
NAMES = ("", "record", "follow", "copy", "write", "wait", "launch", "torch", "copy rows")
EVENT = 77
MOST = 4096
_PARAMETERS = 4096  # bytes that are kept of a launch


def compiler() -> str | None:
    """As Triton finds it."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")


def build(folder: Path) -> Path:
    """The library, compiled into `folder`."""
    import triton.backends.nvidia as nvidia

    made = folder / "libcuda.so.1"
    headers = Path(nvidia.__file__).parent / "include"
    subprocess.run(
        [compiler() or "cc", "-O2", "-shared", "-fPIC", "-w", f"-Wl,-soname,{made.name}",
         f"-I{headers}", str(HERE / "fake_driver.c"), "-o", str(made), "-ldl"],
        check=True,
    )  # fmt: skip
    return made


class _Done(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("what", "stream", "a", "b", "c")]


class _Written(ctypes.Structure):
    """A memory operation of a batch, as far as the engine uses it."""

    _fields_ = [
        ("operation", ctypes.c_int), ("_", ctypes.c_int), ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("_more", ctypes.c_uint8 * 20),
    ]  # fmt: skip

    @property
    def writeValue(self) -> _Written:
        return self

    waitValue = writeValue


class _Box(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_int),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]  # fmt: skip


class Driver:
    """What the copy engine of `cuda_backend` calls, and what has been done."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1)
    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WAIT_VALUE_32=1, CU_STREAM_MEM_OP_WRITE_VALUE_32=2
    )
    CUstreamBatchMemOpParams = _Written
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4)
    CUDA_MEMCPY2D = _Box
    CUevent = CUstream = staticmethod(int)

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def word(self, name: str, kind: type = ctypes.c_int) -> ctypes._SimpleCData:
        """A variable of the library, such as `fake_refuse_at`."""
        return kind.in_dll(self._library, name)

    @property
    def count(self) -> ctypes.c_int64:
        return self.word("fake_count", ctypes.c_int64)

    def done(self) -> Iterator[tuple]:
        """(what, stream, three numbers) of every operation, which are then forgotten."""
        count = self.count
        assert count.value <= MOST, f"{count.value} operations done, {MOST} are kept"
        for one in (_Done * count.value).in_dll(self._library, "fake_done"):
            yield NAMES[one.what], one.stream, one.a, one.b, one.c
        count.value = 0

    def parameters(self, size: int, launch: int = -1) -> bytes:
        """Of one of the last launches, by its number; of the last one."""
        launches = self.word("fake_launches", ctypes.c_int64).value
        number = launch if launch >= 0 else launches + launch
        kept = (ctypes.c_uint8 * _PARAMETERS * 16).in_dll(self._library, "fake_parameters")
        return bytes(kept[number % 16][:size])

    def expect_parameters(self, function: int, *sizes: int) -> None:
        """How large the driver says that a kernel's parameters are."""
        known = (ctypes.c_size_t * 128 * 64).in_dll(self._library, "fake_sizes")[function]
        known[:] = [*sizes, *[0] * (128 - len(sizes))]

    @property
    def context(self) -> int:
        """Of this thread: 1 + the device's number; 0 for none."""
        return self._call("fake_own_context")[0]

    @context.setter
    def context(self, context: int) -> None:
        self._call("cuCtxSetCurrent", context)

    def by_torch(self, stream: int, *addresses: int) -> int:
        """A kernel of torch's with up to three operands has come to a stream; the code."""
        return self._call("fake_torch", stream, *addresses, *[0] * (3 - len(addresses)))[0]

    def refuse(self, number: int, code: int = 700) -> None:
        """The operation of this number is refused; -1 for none."""
        self.word("fake_refuse_at", ctypes.c_int64).value = number
        self.word("fake_code").value = code

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        return self._call("cuEventRecord", event, stream)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        return self._call("cuStreamWaitEvent", stream, event, flags)

    def cuMemcpyDtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[int]:
        return self._call("cuMemcpyDtoDAsync_v2", to, source, size, stream)

    def cuMemcpy2DAsync(self, box: _Box, stream: int) -> tuple[int]:
        return self._call("cuMemcpy2DAsync_v2", ctypes.byref(box), stream)

    def cuStreamWriteValue32(self, stream: int, at: int, word: int, flags: int) -> tuple[int]:
        return self._call("cuStreamWriteValue32_v2", stream, at, word, flags)

    def cuStreamWaitValue32(self, stream: int, at: int, word: int, flags: int) -> tuple[int]:
        return self._call("cuStreamWaitValue32_v2", stream, at, word, flags)

    def cuStreamBatchMemOp(self, stream: int, count: int, given: list, flags: int) -> tuple[int]:
        together = (_Written * count)(*given)
        return self._call("cuStreamBatchMemOp_v2", stream, count, together, flags)

    def _call(self, name: str, *given: object) -> tuple[int]:
        numbers = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in given]
        return (self._library[name](*numbers),)
