"""An own fused kernel, y = rms_norm(all_gather(x)) * weight: docs/extend.md explains it.

torchrun --nproc-per-node 2 scripts/own_kernel.py                       a GPU for each rank
TRITON_INTERPRET=1 torchrun --nproc-per-node 2 scripts/own_kernel.py    no GPU: interpreted, slow
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import flux_megatron
import flux_megatron.device.triton as fm
from flux_megatron.device import SLOTS, Channel


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def all_gather_rms_norm_kernel(
    x, weight, y, M_shard, N, tiles_slot,
    buffers, pads, counters, work, status, rank, epoch, timeout_ns: tl.int64,
    EPS: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    deadline = fm.deadline_after(timeout_ns)
    dtype = x.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)
    gamma = tl.load(weight + cols, mask=cols < N, other=0.0).to(tl.float32)
    tiles_shard = tl.cdiv(M_shard, BLOCK_M)
    tiles = WORLD_SIZE * tiles_shard

    tile = fm.draw_tile(work)
    while tile < tiles:
        source = (rank + tile // tiles_shard) % WORLD_SIZE  # the local shard first
        block = tile % tiles_shard
        slot = block // tiles_slot
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < M_shard)[:, None] & (cols < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]  # in a shard
        whole = at + tl.cast(source, tl.int64) * M_shard * N  # in the gathered x, and in y

        if source == rank:
            values = tl.load(x + at, mask=inside, other=0.0)
            arrivals = tl.minimum(tiles_slot, tiles_shard - slot * tiles_slot)
            for step in range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                fm.put_tile(buffers, peer, whole, values, inside)
                if fm.count_tile(counters, peer, slot, arrivals):
                    fm.signal_tile(pads, peer, rank, slot, epoch)
        else:
            fm.wait_tile(pads, rank, source, slot, epoch, deadline, status)
            gathered = fm.peer_pointer(buffers, rank, dtype)
            values = tl.load(gathered + whole, mask=inside, other=0.0)

        values = values.to(tl.float32)
        mean_square = tl.div_rn(tl.sum(values * values, 1), N * 1.0)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean_square + EPS))
        result = values * scale[:, None] * gamma[None, :]
        tl.store(y + whole, result.to(dtype), mask=inside)
        tile = fm.draw_tile(work)
    fm.close_draws(tile, tiles, work)


def all_gather_rms_norm(
    x: Tensor, weight: Tensor, channel: Channel, eps: float = 1e-5, block_elements: int = 4096
) -> Tensor:
    """x [M_shard, N] of each rank, contiguous  ->  y [M, N] on every rank."""
    M_shard, N = x.shape
    block_n = triton.next_power_of_2(N)
    block_m = max(1, block_elements // block_n)
    tiles_shard = triton.cdiv(M_shard, block_m)
    world_size = channel.world_size
    y = x.new_empty(world_size * M_shard, N)
    with channel.begin(y.nbytes) as call:
        all_gather_rms_norm_kernel[call.grid(world_size * tiles_shard, ctas_per_sm=2)](
            x, weight, y, M_shard, N, triton.cdiv(tiles_shard, SLOTS), **call.arguments,
            EPS=eps, WORLD_SIZE=world_size, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
        )  # fmt: skip
    return y


def reference(x: Tensor, weight: Tensor, group: dist.ProcessGroup, eps: float = 1e-5) -> Tensor:
    """The same by plain torch, in fp64, rounded once."""
    shards = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(shards, x, group=group)
    gathered = torch.cat(shards).double()
    return F.rms_norm(gathered, (x.shape[1],), weight.double(), eps).to(x.dtype)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD
    channel = Channel("all_gather_rms_norm", group, device)
    torch.manual_seed(dist.get_rank())
    weight = torch.ones(96, device=device)
    for call in range(5):
        x = torch.randn(200, 96, device=device)
        y = all_gather_rms_norm(x, weight, channel)
        flux_megatron.synchronize()  # raises if a wait was late
        difference = (y - reference(x, weight, group)).abs().max().item()
        if dist.get_rank() == 0:
            print(f"call {call}: largest difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
