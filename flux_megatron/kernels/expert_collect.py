"""The last step of gemm_a2a on Hopper: rows that other ranks have made are copied to y.

A kernel of its own, behind the GEMM: warps that await [Z] beside the tensor cores slow them down,
and all SMs copy faster than what a GEMM leaves of them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.expert_routes import (
    OWN_SEND_TILES,
    SEND_TILES,
    experts_per_signal,
    word,
)
from flux_megatron.kernels.gemm_a2a import COPY_COLUMNS, collect
from flux_megatron.kernels.primitives import deadline_after
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.problem import Tile

CTAS_PER_SM = 4  # of 8 warps, so that enough loads are on the way


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def expert_collect_kernel(
    received, y, routes, pad, status, rank, epoch, timeout_ns: tl.int64, N,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PER_SIGNAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    groups: tl.constexpr = WORLD_SIZE * EXPERTS
    own = tl.load(word(routes, OWN_SEND_TILES, groups))
    copies = tl.load(word(routes, SEND_TILES, groups)) - own
    for copy in range(tl.program_id(0), copies, tl.num_programs(0)):
        collect(
            y, routes, received, pad, status, copy, rank, epoch, deadline, N,
            WORLD_SIZE, EXPERTS, PER_SIGNAL, ROWS, COLUMNS, BLOCK_G,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _launcher(
    world_size: int, experts: int, capacity: int, N: int, dtype: torch.dtype, device: torch.device,
    comm_rows: int,
) -> Launcher:  # fmt: skip
    most = cdiv(capacity, comm_rows) + world_size * experts  # each group may end with a part
    (sms,) = launch.persistent_grid(device, most)
    return Launcher(
        expert_collect_kernel, (min(most, CTAS_PER_SM * sms),), Tile(num_warps=8), (N,),
        WORLD_SIZE=world_size, EXPERTS=experts, PER_SIGNAL=experts_per_signal(experts),
        ROWS=comm_rows, COLUMNS=min(COPY_COLUMNS, next_power_of_2(N)),
        BLOCK_G=next_power_of_2(world_size * experts),
    )  # fmt: skip


def expert_collect(
    received: Tensor, y: Tensor, routes: Tensor, *, pad: Tensor, status: Tensor, rank: int,
    world_size: int, epoch: int, timeout_ns: int, experts: int, comm_rows: int,
) -> None:  # fmt: skip
    """Copy rows of experts of other ranks from `received` [capacity, N], this rank's region, to
    y [tokens, N], when [Z] says that they are there.
    """
    run = _launcher(world_size, experts, *received.shape, y.dtype, y.device, comm_rows)
    run((received, y, routes, pad, status), (rank, epoch, timeout_ns))
