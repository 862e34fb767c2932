"""The last step of gemm_a2a on Hopper: rows that other ranks have made are copied to y.

A kernel of its own, behind the GEMM: warps that await [Z] beside the tensor cores slow them down,
and all SMs copy faster than what a GEMM leaves of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.expert_call import ExpertCall
from flux_megatron.kernels.expert_routes import OWN_SEND_TILES, SEND_TILES, word
from flux_megatron.kernels.gemm_a2a import collect
from flux_megatron.kernels.primitives import deadline_after
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.triton_launch import launch_kernel
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


def expert_collect(received: Tensor, y: Tensor, routes: Tensor, about: ExpertCall) -> None:
    """Copy rows of experts of other ranks from `received` [capacity, N], this rank's region, to
    y [tokens, N], when [Z] says that they are there.
    """
    most = cdiv(about.capacity, about.comm_rows) + about.groups  # each may end with a part
    (sms,) = launch.persistent_grid(y.device, most)
    _, pad, _, status = about.tensors
    launch_kernel(
        expert_collect_kernel, (min(most, CTAS_PER_SM * sms),), Tile(num_warps=8),
        (received, y, routes, pad, status), about.numbers, (y.shape[1],),
        **about.constants(y.shape[1]),
    )  # fmt: skip
