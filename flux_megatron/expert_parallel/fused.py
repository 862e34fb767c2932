"""Communication inside the GEMM's kernel: rows and tiles go straight into the other rank's buffer.

Each call begins with an exchange of counts, after which every rank knows all offsets. The host
never reads them. `hopper` runs the same calls by the Hopper kernels, of the same routes and
signals, so ranks need not run the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts import a2a_gemm as a2a_gemm_kernels
from flux_megatron.kernels.experts import gemm_a2a as gemm_a2a_kernels
from flux_megatron.kernels.experts.call import ExpertCall, exchange_counts, header_bytes
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.workspace import Workspace

# the channels of a workspace
DISPATCH, COMBINE = "dispatch", "combine"
COMM_ROWS = 32  # of a push or a copy


def supports(x: Tensor, N: int, layout: str, space: Workspace) -> str | None:
    """Why this strategy cannot run the call, or None."""
    return space.unavailable or launch.supports_tensors(x.dtype, x.device.type)


def default_plan(x: Tensor, N: int) -> Plan:
    if x.device.type == "cpu":  # few large blocks are cheaper than many
        block_k = min(64, next_power_of_2(x.shape[1]))
        return Plan("fused", COMM_ROWS, Tile(32, min(64, next_power_of_2(N)), block_k))
    if x.dtype == torch.float32:
        return Plan("fused", COMM_ROWS, Tile(64, 64, 32, num_warps=4))
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return Plan("fused", COMM_ROWS, Tile(128, 128, 64, num_warps=8, num_stages=3))
    return Plan("fused", COMM_ROWS, Tile(128, 256, 64, num_warps=8, num_stages=3, tma=True))


def a2a_gemm(
    x: Tensor, w: ExpertWeights, counts: Tensor, capacity: int, layout: str, keep: bool, plan: Plan,
    space: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [capacity, N], received counts [R, E], and the received rows if they are to be kept."""
    T, K = x.shape
    about, routes, received = _begin(DISPATCH, counts, T, capacity, K, x, layout, plan, space)
    arrived = about.received(x, K)
    rows = x.new_empty(capacity if keep else 0, K)
    with phase("a2a_gemm kernel"):
        if _by_hopper(plan, x, w):
            from flux_megatron.kernels.experts import hopper_a2a_gemm

            y = hopper_a2a_gemm.a2a_gemm(x, arrived, w, rows, routes, about)
        else:
            y = a2a_gemm_kernels.a2a_gemm(x, w, routes, about, keep=keep)
            if keep:
                rows.copy_(arrived)
    space.end(about.call)
    return y, received, rows


def gemm_a2a(
    x: Tensor, w: ExpertWeights, counts: Tensor, tokens: int, layout: str, plan: Plan,
    space: Workspace,
) -> Tensor:  # fmt: skip
    """y [tokens, N], in the order in which the tokens were sent."""
    capacity, N = len(x), w.columns(layout)
    about, routes, _ = _begin(COMBINE, counts, tokens, capacity, N, x, layout, plan, space)
    with phase("gemm_a2a kernel"):
        if _by_hopper(plan, x, w):
            from flux_megatron.kernels.experts import hopper_gemm_a2a

            arrived = about.received(x, N)
            y = hopper_gemm_a2a.gemm_a2a(x, w, arrived, routes, about, tokens=tokens)
        else:
            y = gemm_a2a_kernels.gemm_a2a(x, w, routes, about, tokens=tokens)
    space.end(about.call)
    return y


def _by_hopper(plan: Plan, x: Tensor, w: ExpertWeights) -> bool:
    """Whether the Hopper kernels compute it: TMA needs whole units."""
    return plan.strategy == "hopper" and launch.has_whole_units(x, w.matrices)


def _begin(
    channel: str, counts: Tensor, rows: int, capacity: int, columns: int, x: Tensor, layout: str,
    plan: Plan, space: Workspace,
) -> tuple[ExpertCall, Tensor, Tensor]:  # fmt: skip
    """A call with `capacity` rows of `columns` elements in its region, its routes, and what this
    rank receives.
    """
    header = header_bytes(*counts.shape)
    call = transfer.begin(space, channel, header + capacity * columns * x.element_size())
    about = ExpertCall(call, counts.shape[1], capacity, layout, plan.tile, plan.comm_rows)
    with phase("exchange of counts"):
        routes, received = exchange_counts(counts, about, rows=rows)
    return about, routes, received
