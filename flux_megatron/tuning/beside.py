"""What candidates are timed beside: collectives of a second communicator of the same ranks.

A training run reduces gradients, gathers parameters and sends activations while a layer's GEMMs
run. NCCL's all-reduce of large blocks stands for all of that: it holds SMs, memory bandwidth and
links for as long as the candidate runs. `bench` has all-gathers and reduce-scatters too.
"""

from __future__ import annotations

import atexit
import math
import time
import uuid
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.symm import objects
from flux_megatron.symm.groups import store_of, timeout_s

BLOCK_BYTES = {"cuda": 512 * 2**20, "cpu": 2**20}  # of one collective, where it is whole
# The blocks last so many times as long as the longest candidate takes alone: a kernel that gets its
# last SM only for a second wave takes 1.75 times as long.
STRETCH = 2.0
TRIALS = 3  # of one block, of which the shortest counts

_seconds: WeakKeyDictionary[ProcessGroup, Any] = WeakKeyDictionary()


class NoRoom(MemoryError):
    """Some rank has no memory for a block; raised on every rank."""


class Load:
    """Collectives of `blocks` blocks, on a stream of their own.

    Collective constructor, for candidates of which the longest takes `longest_us` alone, the same
    number on every rank. `NoRoom` on every rank if one has no memory for a block.

    The blocks are one block, again and again, in one launch: with CUDA_DEVICE_MAX_CONNECTIONS=1 a
    launch that waits for the one before holds up all streams, and a candidate behind several would
    start with the last of them.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, longest_us: float,
        collective: str = "all_reduce",
    ) -> None:  # fmt: skip
        self._device, self._second = device, second_communicator(group, device)
        self._collective, block = collective, _block(group, device)
        size = len(block) // group.size()
        self._whole, self._shard = block[: size * group.size()], block[:size]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: dist.Work | None = None
        self.blocks = 1
        self._timed_us(group)  # connects the ranks
        block_us = min(self._timed_us(group) for _ in range(TRIALS))
        self.blocks = blocks(longest_us, block_us)

    def start(self) -> None:
        """Enqueue the blocks behind what the current stream holds. What the stream gets from now on
        runs beside them.
        """
        if self._stream is None:
            self._enqueue()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._enqueue()

    def ended(self) -> bool:
        """Whether the last block is done. The host asks, because an event behind the candidate is
        recorded after it where CUDA_DEVICE_MAX_CONNECTIONS is 1.
        """
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Let the host, on CUDA the current stream, wait for the last block."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def _enqueue(self) -> None:
        if self._collective == "all_reduce":
            self._work = self._second.allreduce_coalesced([self._whole] * self.blocks)
            return
        together = self._second.supports_coalescing  # not of Gloo, which runs them in turn
        if together:
            self._second._start_coalescing()
        for _ in range(self.blocks):
            if self._collective == "all_gather":
                self._work = self._second._allgather_base(self._whole, self._shard)
            else:
                self._work = self._second._reduce_scatter_base(self._shard, self._whole)
        if together:
            self._work = self._second._end_coalescing()

    def _timed_us(self, group: ProcessGroup) -> float:
        """One block with nothing beside it; the same number on every rank."""
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        _synchronize(self._device)
        started = time.perf_counter()
        self.start()
        self.wait()
        _synchronize(self._device)
        elapsed_us = (time.perf_counter() - started) * 1e6
        took_us = torch.tensor(elapsed_us, dtype=torch.float64, device=self._device)
        dist.all_reduce(took_us, op=dist.ReduceOp.MIN, group=group)
        return took_us.item()


def blocks(longest_us: float, block_us: float) -> int:
    """So many that one is still running when the longest candidate ends."""
    return math.ceil(STRETCH * longest_us / block_us) + 1


def second_communicator(group: ProcessGroup, device: torch.device) -> Any:
    """A backend of torch.distributed for the ranks of `group`, made once and kept. Collective over
    `group` alone.

    It is no registered group: making one would ask all ranks of the job, or its name would depend
    on how many groups a rank has.
    """
    if group not in _seconds:
        nonce = objects.broadcast(uuid.uuid4().hex, group)
        store = dist.PrefixStore(f"flux_megatron/beside/{nonce}", store_of(group))
        limit = timedelta(seconds=timeout_s(group))
        made: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            made = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
        else:
            made = dist.ProcessGroupGloo(store, group.rank(), group.size(), limit)
        _seconds[group] = made
    return _seconds[group]


# Gloo's threads abort a process whose interpreter has begun to end, unless they are joined before.
atexit.register(_seconds.clear)


def _block(group: ProcessGroup, device: torch.device) -> Tensor:
    """Zeros, which stay zeros however often they are summed."""
    found: Tensor | None = None
    said = ""
    try:
        found = torch.zeros(BLOCK_BYTES[device.type] // 4, device=device)
    except torch.OutOfMemoryError as error:
        said = str(error)
    answers = objects.all_gather(said, group)
    if lacking := [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]:
        size_bytes = BLOCK_BYTES[device.type]
        raise NoRoom(f"no {size_bytes} bytes for a collective beside: {'; '.join(lacking)}")
    assert found is not None, "every rank has one"
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
