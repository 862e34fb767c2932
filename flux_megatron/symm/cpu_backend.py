"""Symmetric memory on CPU: one memfd a rank, which all ranks of one machine map shared; and the
copies there.

A crash leaves no memfd behind, and /dev/shm does not limit its size. Addresses differ from process
to process, as they do between GPUs.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import objects
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.copy_engine import CopyEngine


def allocate(size_bytes: int, group: ProcessGroup) -> SymmetricBuffer:
    """Zeroed memory of `size_bytes` a rank. Collective over `group`.

    `WorkspaceError`, on every rank, if one has too little memory, or cannot open another's memfd:
    ranks in separate containers do not see each other's /proc.
    """
    size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor, problem = -1, ""
    try:  # reserve the pages: the first write to a missing page would kill the process
        descriptor = os.memfd_create("flux_megatron")
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        problem = f"{size_bytes} bytes of shared memory: {error}"
    paths = objects.all_gather(f"/proc/{os.getpid()}/fd/{descriptor}", group)
    maps: list[mmap.mmap] = []
    try:
        maps += [_mapped(path, size_bytes) for path in paths]
    except (OSError, ValueError) as error:  # ValueError: the other rank's is too short
        problem = problem or str(error)
    problems = objects.all_gather(problem, group)
    if descriptor >= 0:
        os.close(descriptor)  # all ranks have mapped it
    if any(problems):
        listed = "; ".join(f"rank {r}: {text}" for r, text in enumerate(problems) if text)
        raise errors.WorkspaceError(f"ranks cannot share memory: {listed}")
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in maps]
    return SymmetricBuffer(
        rank=group.rank(),
        shards=tuple(torch.frombuffer(m, dtype=torch.uint8) for m in maps),
        pointers=torch.tensor(addresses, dtype=torch.int64),
        keep_alive=maps,
    )


def _mapped(path: str, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)


class CpuCopyEngine(CopyEngine):
    """Copies at once. x86-64 keeps stores in order, so a signal never overtakes its data."""

    def current(self) -> int:
        return 0

    def order(self, later: int, earlier: int) -> None: ...

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)

    def copy_rows(
        self, destination: int, source: int, size_bytes: int, rows: int, pitch_bytes: int
    ) -> None:
        for behind in range(0, rows * pitch_bytes, pitch_bytes):
            self.copy(destination + behind, source + behind, size_bytes)

    def copy_here(self, destination: int, source: int, size_bytes: int) -> None:
        self.copy(destination, source, size_bytes)

    def write(self, address: int, word: int) -> None:
        ctypes.c_int32.from_address(address).value = word

    def wait_count(self, counter: int, count: int) -> None:
        seen = ctypes.c_int32.from_address(counter).value
        assert seen >= count, f"kernels have returned, but counted {seen} of {count}"
