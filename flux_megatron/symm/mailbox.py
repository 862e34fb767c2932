"""Symmetric memory for GPUs that reach none of each other: a mailbox a rank in the host's memory.

Copy engines of other ranks push into the mailbox, and rank barriers signal there. A stream of its
owner brings what has come to the same place of memory on the owner's GPU (`overlap.arrivals`). So
kernels find data and signals where they would be without mailboxes.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import cpu_backend, cuda_memory, objects
from flux_megatron.symm.buffer import SymmetricBuffer

_left: list[Tensor] = []
_FLAGS = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, for all contexts, and _DEVICEMAP


def allocate(size_bytes: int, group: ProcessGroup, device: torch.device) -> SymmetricBuffer:
    """Zeroed memory of `size_bytes` on this rank's GPU, and as much in a mailbox of every rank.
    Collective; blocks the host. `WorkspaceError`, on every rank, if one gets none.
    """
    torch.cuda.synchronize(device)  # the driver's functions need the context that this makes
    cuda_memory.refuse_shared_gpus(objects.all_gather(cuda_memory.uuid_of(device.index), group))
    shared = cpu_backend.allocate(size_bytes, group)
    boxes, failure = list[Registered](), ""
    try:
        here = torch.zeros(shared.size_bytes, dtype=torch.uint8, device=device)
        for shard in shared.shards:
            boxes.append(Registered(shard, device))
        torch.cuda.synchronize(device)  # before a stream brings anything
    except RuntimeError as error:
        failure = cuda_memory.first_line(error)
    cuda_memory.refuse(size_bytes, objects.all_gather(failure, group))
    rank = group.rank()
    shards = [one.tensor for one in boxes]
    mailbox, shards[rank] = shards[rank], here
    addresses = torch.tensor([one.data_ptr() for one in shards], dtype=torch.int64, device=device)
    return SymmetricBuffer(rank, tuple(shards), addresses, boxes, mailbox)


def why_none(group: ProcessGroup, device: torch.device) -> str | None:
    """How an allocation fails; None if it does not. Collective, the same on every rank."""
    try:
        allocate(cuda_memory.PAGE_BYTES, group, device)
    except errors.WorkspaceError as error:
        return str(error)
    return None


class Registered:
    """Host memory that the device reaches at the same address, as `tensor`, until this object goes;
    the tensor does not keep it.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        address, size_bytes = memory.data_ptr(), memory.numel()
        cuda_memory.call("cuMemHostRegister", address, size_bytes, _FLAGS)
        # the process's end frees it too, while other threads may use it
        weakref.finalize(self, _unregister, memory, device).atexit = False
        if int(cuda_memory.call("cuMemHostGetDevicePointer", address, 0)) != address:
            raise RuntimeError("the GPU reaches host memory at another address only")
        self.tensor = cuda_memory.tensor_at(address, size_bytes, device)


def _unregister(memory: Tensor, device: torch.device) -> None:
    if cuda_memory.ending():
        _left.append(memory)  # a copy may use it to the last
        return
    with contextlib.suppress(RuntimeError):  # a device that has failed: its process ends
        torch.cuda.synchronize(device)  # a copy may still use it
        cuda_memory.call("cuMemHostUnregister", memory.data_ptr())
