"""`fused` by the Hopper kernels: warps of each CTA load, multiply, store and move rows.

They serve the same routes and signals as the portable kernels, so ranks need not run the same ones.
"""

from __future__ import annotations

from torch import Tensor

from flux_megatron.expert_parallel import fused
from flux_megatron.expert_parallel.fused import COMBINE, COMM_ROWS, DISPATCH
from flux_megatron.kernels import hopper_gemm, launch
from flux_megatron.kernels.expert_weights import ExpertWeights
from flux_megatron.kernels.hopper_expert_config import TILE
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace


def supports(x: Tensor, N: int, layout: str, space: Workspace) -> str | None:
    """Why this strategy cannot run the call, or None."""
    return fused.supports(x, N, layout, space) or hopper_gemm.refuses_experts(
        x.device.type, x.dtype, x.shape[1], N, layout
    )


def default_plan(x: Tensor, N: int) -> Plan:
    return Plan("hopper", COMM_ROWS, TILE)


def a2a_gemm(
    x: Tensor, w: ExpertWeights, counts: Tensor, capacity: int, layout: str, keep: bool, plan: Plan,
    space: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [capacity, N], received counts [R, E], and the received rows if they are to be kept."""
    if not launch.has_whole_units(x, w.matrices):  # TMA needs them
        return fused.a2a_gemm(x, w, counts, capacity, layout, keep, plan, space)
    from flux_megatron.kernels import hopper_a2a_gemm

    K = x.shape[1]
    call, routes, received = fused.begin(DISPATCH, counts, x.shape[0], capacity, K, x, plan, space)
    rows = x.new_empty(capacity if keep else 0, K)
    with phase("a2a_gemm kernel"):
        y = hopper_a2a_gemm.a2a_gemm(
            x, fused.received_rows(call, counts, x, capacity, K), w, rows, routes,
            **fused.about(call), work_words=call.channel.work_counter, layout=layout,
            tile=plan.tile, comm_rows=plan.comm_rows,
        )  # fmt: skip
    space.end(call)
    return y, received, rows


def gemm_a2a(
    x: Tensor,
    w: ExpertWeights,
    counts: Tensor,
    tokens: int,
    layout: str,
    plan: Plan,
    space: Workspace,
) -> Tensor:
    """y [tokens, N], in the order in which the tokens were sent."""
    if not launch.has_whole_units(x, w.matrices):
        return fused.gemm_a2a(x, w, counts, tokens, layout, plan, space)
    from flux_megatron.kernels import hopper_gemm_a2a

    N = w.matrices.shape[1 if layout == "nt" else 2]
    capacity = x.shape[0]
    call, routes, _ = fused.begin(COMBINE, counts, tokens, capacity, N, x, plan, space)
    with phase("gemm_a2a kernel"):
        y = hopper_gemm_a2a.gemm_a2a(
            x, w, fused.received_rows(call, counts, x, capacity, N), routes, **fused.about(call),
            work_words=call.channel.work_counter, tokens=tokens, layout=layout, tile=plan.tile,
            comm_rows=plan.comm_rows,
        )  # fmt: skip
    space.end(call)
    return y
