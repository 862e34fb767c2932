"""The driver's functions for memory that processes share, on files of the CPU's memory: a stand-in
for `cuda.bindings.driver`, whose functions a test may have refuse.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from flux_megatron.symm import copies, cuda_memory

DEVICE = torch.device("cpu")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _SHARED, _PRIVATE, _ANONYMOUS = 0x10, 0x01, 0x02, 0x20
_NOTHING = 0  # may be done with the memory
OK, REFUSED = 0, "CUDA_ERROR_REFUSED"
GIVE_NOTHING = ("cuMemMap", "cuMemHostRegister")


class Driver:
    """`handles` are the files that are held; `mapped`, by their addresses, the sizes; `refuses` are
    names of functions.
    """

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, refuses: tuple[str, ...] = ()) -> None:
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.registered: dict[int, int] = {}  # of the host, by their addresses, the sizes
        self._refuses = refuses

    def __getattribute__(self, name: str) -> object:
        if name.startswith("cuMem") and name in self._refuses:
            return lambda *given: (REFUSED, *[None] * (name not in GIVE_NOTHING))
        return super().__getattribute__(name)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemCreate(self, size: int, properties: SimpleNamespace, flags: int) -> tuple[int, int]:
        assert properties.type == properties.location.type == properties.requestedHandleTypes == 1
        assert properties.location.id == DEVICE.index
        file = os.memfd_create("memory")
        os.ftruncate(file, size)
        os.pwrite(file, b"\xff" * size, 0)  # what is new is not zero
        self.handles.add(file)
        return OK, file

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[int, int]:
        assert handle in self.handles
        return OK, os.dup(handle)

    def cuMemImportFromShareableHandle(self, file: int, kind: int) -> tuple[int, int]:
        handle = os.dup(file)
        self.handles.add(handle)
        return OK, handle

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.handles.remove(handle)
        os.close(handle)
        return (OK,)

    def cuMemAddressReserve(self, size: int, align: int, at: int, flags: int) -> tuple[int, int]:
        address = _libc.mmap(None, size, _NOTHING, _PRIVATE | _ANONYMOUS, -1, 0)
        self.reserved[address] = size
        return OK, address

    def cuMemMap(self, at: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert self.reserved[at] == size
        assert os.fstat(handle).st_size == size
        both = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mmap(at, size, both, _SHARED | _FIXED, handle, 0) == at
        self.mapped[at] = size
        return (OK,)

    def cuMemSetAccess(self, at: int, size: int, given: list, count: int) -> tuple[int]:
        assert self.mapped[at] == size
        assert count == len(given) == 1
        assert (given[0].location.id, given[0].flags) == (DEVICE.index, 3)
        return (OK,)

    def cuMemHostRegister(self, at: int, size: int, flags: int) -> tuple[int]:
        self.registered[at] = size
        return (OK,)

    def cuMemHostGetDevicePointer(self, at: int, flags: int) -> tuple[int, int]:
        assert at in self.registered
        return OK, at

    def cuMemHostUnregister(self, at: int) -> tuple[int]:
        del self.registered[at]
        return (OK,)

    def cuMemUnmap(self, at: int, size: int) -> tuple[int]:
        assert self.mapped.pop(at) == size
        return (OK,)

    def cuMemAddressFree(self, at: int, size: int) -> tuple[int]:
        assert self.reserved.pop(at) == size
        assert at not in self.mapped
        _libc.munmap(at, size)
        return (OK,)


@contextmanager
def fake(uuid: str, *refuses: str) -> Iterator[Driver]:
    """A GPU of this name, whose driver refuses these functions."""
    driver = Driver(refuses)
    known = SimpleNamespace(uuid=uuid)
    with ExitStack() as replaced:
        for where, name, given in (
            (cuda_memory, "_driver", lambda: driver),
            (torch.cuda, "synchronize", lambda device: None),
            (torch.cuda, "get_device_properties", lambda device: known),
            (copies, "_made_by_sms", set()),  # a CPU sees no GPU
        ):
            replaced.enter_context(mock.patch.object(where, name, given))
        yield driver
