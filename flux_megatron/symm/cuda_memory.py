"""Symmetric memory on GPUs of one node: each rank makes its part, and maps that of every other.

It is the driver's, not torch's symmetric memory, which asks torch's own map for the group, numbers
the exchanges of a process and not of a group, and waits for peers without a bound.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import copies, objects
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.descriptors import Letterbox
from flux_megatron.symm.groups import timeout_s

_ending = False
PAGE_BYTES = 1 << 21  # what the driver maps at once
# torch's variable: several ranks may share a GPU, whose kernels then take turns
SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def allocate(size_bytes: int, group: ProcessGroup, device: torch.device) -> SymmetricBuffer:
    """Zeroed memory of `size_bytes` a rank. Collective over `group`; blocks the host.

    `WorkspaceError`, on every rank, if one has too little memory, or cannot map another's.
    """
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    torch.cuda.synchronize(device)  # the driver's functions need the context that this makes
    memory, mapped = Memory(size_bytes, device), list[Mapping]()
    with contextlib.closing(memory), contextlib.closing(Letterbox()) as box:
        uuid = uuid_of(device.index)
        uuids, addresses, failures = zip(
            *objects.all_gather((uuid, box.address, memory.failure), group), strict=True
        )
        refuse(size_bytes, failures)
        refuse_shared_gpus(uuids)
        others = [one for rank, one in enumerate(uuids) if rank != group.rank()]
        copies.note_peers(device, uuid, others, {*map(uuid_of, range(torch.cuda.device_count()))})
        failure = ""
        try:
            shared = box.exchange(memory.descriptor, addresses, group.rank(), timeout_s(group))
            mapped += _mapped(memory, shared, group.rank())
            mapped[group.rank()].tensor.zero_()
            torch.cuda.synchronize(device)
        except (RuntimeError, OSError) as error:
            failure = first_line(error)
        # and no rank signals before all ranks have zeroed their memory
        refuse(size_bytes, objects.all_gather(failure, group))
    addresses_here = [one.address for one in mapped]
    return SymmetricBuffer(
        rank=group.rank(),
        shards=tuple(one.tensor for one in mapped),
        pointers=torch.tensor(addresses_here, dtype=torch.int64, device=device),
        keep_alive=mapped,
    )


def why_not_shared(group: ProcessGroup, device: torch.device) -> str | None:
    """How an allocation fails; None if it does not. Collective, the same on every rank."""
    try:
        allocate(PAGE_BYTES, group, device)
    except errors.WorkspaceError as error:
        return f"the GPUs share no memory: {error}"
    return None


def uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def refuse_shared_gpus(uuids: Sequence[str]) -> None:
    """Unless torch's variable permits them."""
    if len({*uuids}) < len(uuids) and os.environ.get(SHARED_GPUS) != "1":
        raise errors.WorkspaceError(f"several ranks share a GPU: {', '.join(uuids)}")


def refuse(size_bytes: int, failures: Sequence[str]) -> None:
    """`WorkspaceError` of the first rank that failed, if one did."""
    for rank, failure in enumerate(failures):
        if failure:
            raise errors.WorkspaceError(
                f"symmetric memory of {size_bytes} bytes: rank {rank}: {failure}"
            )


def first_line(error: Exception) -> str:
    """torch's errors have the stack of C++ behind it."""
    return str(error).partition("\n")[0]


class Memory:
    """Memory of a device that other processes can map through its `descriptor`, until it is closed
    and nobody maps it; `failure` says why there is none.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes, self.device, self.failure = size_bytes, device, ""
        self.handle: Any = None
        self.descriptor = -1
        try:
            self.handle = self._created()
            self.descriptor = int(call("cuMemExportToShareableHandle", self.handle, _file(), 0))
        except RuntimeError as error:
            self.failure = first_line(error)

    def _created(self) -> Any:
        given = "cuMemCreate", self.size_bytes, self._properties(), 0
        try:
            return call(*given)
        except RuntimeError as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
        torch.cuda.empty_cache()  # torch frees what it holds and nobody uses for itself alone
        return call(*given)

    def _properties(self) -> Any:
        found = _driver().CUmemAllocationProp()
        found.type = _driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.location.id = self.device.index
        found.requestedHandleTypes = _file()
        return found

    def close(self) -> None:
        """What is mapped stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self.handle is not None:
            call("cuMemRelease", self.handle)


def _mapped(memory: Memory, descriptors: Sequence[int], rank: int) -> list[Mapping]:
    """The memory of every rank in this process. The descriptors of others are closed."""
    mapped = []
    try:
        for other, descriptor in enumerate(descriptors):
            if other == rank:
                mapped.append(Mapping(memory.handle, memory))
                continue
            handle = call("cuMemImportFromShareableHandle", descriptor, _file())
            try:
                mapped.append(Mapping(handle, memory))
            finally:
                call("cuMemRelease", handle)
    finally:
        for other, descriptor in enumerate(descriptors):
            if other != rank:
                os.close(descriptor)
    return mapped


class Mapping:
    """As many bytes as `like` has, of the memory of `handle`, in this process's addresses and for
    its device; they go with this object, and the `tensor` of them does not keep them.
    """

    def __init__(self, handle: Any, like: Memory) -> None:
        size_bytes, device = like.size_bytes, like.device
        address = self.address = int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))
        try:
            call("cuMemMap", address, size_bytes, 0, handle, 0)
        except RuntimeError:
            call("cuMemAddressFree", address, size_bytes)
            raise
        # the process's end frees it too, while other threads may use it
        weakref.finalize(self, _unmap, address, size_bytes, device).atexit = False
        access = _driver().CUmemAccessDesc()
        access.location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = _driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size_bytes, [access], 1)
        self.tensor = tensor_at(address, size_bytes, device)


def tensor_at(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """These bytes, which it does not keep."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def process_ends() -> None:
    """Its memory goes with it: nothing waits for a device in which a collective may never end."""
    global _ending
    _ending = True


def ending() -> bool:
    """Whether the process ends."""
    return _ending


def _unmap(address: int, size_bytes: int, device: torch.device) -> None:
    if _ending:
        return
    with contextlib.suppress(RuntimeError):  # a device that has failed: its process ends
        torch.cuda.synchronize(device)  # a kernel may still use it
        call("cuMemUnmap", address, size_bytes)
        call("cuMemAddressFree", address, size_bytes)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _file() -> Any:
    """The kind of handle that is a file descriptor."""
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def call(name: str, *arguments: Any) -> Any:
    """What a function of the driver gives. `RuntimeError` names it and its error."""
    driver = _driver()
    error, *given = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {getattr(error, 'name', error)}")
    return given[0] if given else None
