"""The host's side of an own kernel: symmetric memory over a group, signals, and numbered calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.kernels import launch
from flux_megatron.overlap import transfer
from flux_megatron.symm import channel as symmetric
from flux_megatron.symm.signals import MAX_COMM_TILES, WORK_CLAIMS, WORK_WORDS
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace

SLOTS = MAX_COMM_TILES  # signals that a rank can send each peer in a call: slots 0 to SLOTS - 1


class Call:
    """One call of an own kernel, open inside `with channel.begin(...)`.

    | attribute | meaning (R = world size) |
    | --- | --- |
    | rank, world_size | in the group |
    | arguments | by name, what a kernel takes: below |

    | argument | meaning |
    | --- | --- |
    | buffers | int64 [R] on the device: the address of every rank's buffer of this call |
    | pads | int64 [R] on the device: the address of every rank's signals |
    | counters | int32 [R * SLOTS], 0 before the kernel and behind it: for `count_tile` |
    | work | int32, 0 before the kernel and behind it: for `draw_tile` |
    | status | int32: where a late wait is recorded |
    | rank, epoch, timeout_ns | numbers; list them in the kernel's `do_not_specialize` |
    """

    def __init__(self, call: symmetric.Call, device: torch.device) -> None:
        self._region, self._device = (region := call.region), device
        self.rank, self.world_size = region.rank, region.world_size
        self.arguments: dict[str, Any] = {
            "buffers": region.pointers,
            "pads": region.pad_pointers,
            "counters": call.channel.tile_counters,
            "work": call.channel.work_counter,
            "status": call.status,
            **dict(zip(("rank", "epoch", "timeout_ns"), call.numbers, strict=True)),
        }

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank `rank`'s buffer from its first byte on, as a tensor of this process."""
        return self._region.view(rank, shape, dtype)

    def grid(self, tiles: int, ctas_per_sm: int = 1) -> tuple[int]:
        """The CTAs of a kernel that draws `tiles` tiles: so many an SM, not more than tiles."""
        (sms,) = launch.persistent_grid(self._device, tiles)
        return (min(tiles, ctas_per_sm * sms, WORK_WORDS - WORK_CLAIMS),)


class Channel:
    """Symmetric memory and signals of one kernel over a group, for any number of calls.

        channel = Channel("all_gather_norm", group, x.device)   # not collective
        with channel.begin(size_bytes) as call:                 # all ranks, in the same order
            kernel[call.grid(tiles)](x, y, **call.arguments, ...)

    Channels of the same name, group and device are one. All layers may share it.

    Signals carry the number of the call, so nobody resets them, and two calls in a row use two
    buffers: no barrier is between them. This needs two things of a kernel. In every call each rank
    waits for a signal of every other rank, sent after that rank's call has begun (`wait_tile`, or
    `rank_barrier` where no data comes). And nothing reads a buffer after its call: copy what is to
    stay.
    """

    def __init__(self, name: str, group: ProcessGroup, device: torch.device) -> None:
        self._name, self._group = f"kernel {name}", group
        self.world_size = group.size()
        self._device = torch.empty(0, device=device).device  # with its index

    @contextmanager
    def begin(self, size_bytes: int) -> Iterator[Call]:
        """Open the next call, with `size_bytes` on each rank, the same on all. Launch on the
        current stream; at the end of the block everything that uses the call has been enqueued.

        A first call, and one that is larger than all before, is collective and blocks the host. A
        capture of a CUDA graph needs a call of that size before it.

        | error | reason |
        | --- | --- |
        | `ValueError` | `size_bytes` is not a positive integer |
        | `ProblemMismatch` | the ranks make different calls |
        | `SignalTimeout` | a wait of an earlier call ran out of time: who waited for what |
        | `GroupBroken` | a rank has failed inside the block: the group cannot be used any more |
        | `WorkspaceError` | no symmetric memory: several nodes, too little, in a capture; a call \
is open; CPU without `TRITON_INTERPRET=1` |

        On CPU a late wait is raised at the end of its own call; on GPUs at the next call, or by
        `flux_megatron.synchronize()` and `check()`: call one before you trust results.
        """
        space = workspace(self._group, self._device)
        self._agree(size_bytes, space)
        with space.guard():
            call = transfer.begin(space, self._name, size_bytes)
            yield Call(call, self._device)
            space.end(call)

    def _agree(self, size_bytes: int, space: Workspace) -> None:
        """Return if all ranks make this call, and can."""
        space.check()  # before a question that a rank which has failed would not answer
        description = f"{self._name} with {size_bytes} bytes"
        if description not in space.agreed:
            reason = space.unavailable or launch.supports_tensors("float32", self._device.type)
            if reason is not None:
                raise errors.WorkspaceError(f"{self._name}: {reason}")
            if not isinstance(size_bytes, int) or size_bytes < 1:
                error = f"{self._name}: size_bytes {size_bytes!r} given, 1 or more expected"
                space.agreement.refuse(error)
                raise ValueError(error)
        space.note_agreed(description)
