"""An own kernel of one CTA that awaits no data, only all ranks: x [R, N] of each rank, y [R, N] the
rows that the others have for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import flux_megatron.device.triton as fm
from flux_megatron.device import Channel


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def all_to_all_kernel(
    x, y, N, buffers, pads, counters, work, status, rank, epoch, timeout_ns: tl.int64,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    deadline = fm.deadline_after(timeout_ns)
    cols = tl.arange(0, BLOCK)
    for peer in range(WORLD_SIZE):
        values = tl.load(x + peer * N + cols, mask=cols < N)
        fm.put_tile(buffers, peer, rank * N + cols, values, cols < N)
    fm.rank_barrier(pads, rank, 5, epoch, deadline, status, WORLD_SIZE)
    received = fm.peer_pointer(buffers, rank, x.dtype.element_ty)
    for source in range(WORLD_SIZE):
        values = tl.load(received + source * N + cols, mask=cols < N)
        tl.store(y + source * N + cols, values, mask=cols < N)


def all_to_all(x: Tensor, channel: Channel) -> Tensor:
    y = torch.empty_like(x)
    with channel.begin(x.nbytes) as call:
        all_to_all_kernel[(1,)](
            x, y, x.shape[1], **call.arguments,
            WORLD_SIZE=call.world_size, BLOCK=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
    return y
