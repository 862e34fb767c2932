"""Symmetric memory on GPUs of one node: torch's symmetric memory (torch >= 2.9)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron.symm.buffer import SymmetricBuffer

# torch maps whole 2 MiB pages for each allocation, so smaller sizes save nothing
_PAGE_BYTES = 1 << 21


def allocate(size_bytes: int, group: ProcessGroup, device: torch.device) -> SymmetricBuffer:
    """Zeroed memory of `size_bytes` a rank. Collective over `group`; blocks the host."""
    import torch.distributed._symmetric_memory as symmetric_memory

    size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    mine = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(mine, group.group_name)
    mine.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group=group)  # nobody signals before everybody has zeroed
    world_size = group.size()
    return SymmetricBuffer(
        rank=group.rank(),
        shards=tuple(handle.get_buffer(r, (size_bytes,), torch.uint8) for r in range(world_size)),
        pointers=torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device),
        keep_alive=(mine, handle),
    )
