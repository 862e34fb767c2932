"""`fused` by the Hopper kernels: warps of each CTA load, multiply, store and move rows."""

from __future__ import annotations

from torch import Tensor

from flux_megatron.expert_parallel import fused
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.hopper.config import LONG
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace

a2a_gemm, gemm_a2a = fused.a2a_gemm, fused.gemm_a2a


def supports(x: Tensor, N: int, layout: str, space: Workspace) -> str | None:
    """Why this strategy cannot run the call, or None."""
    return fused.supports(x, N, layout, space) or hopper_gemm.refuses_experts(
        x.device.type, x.dtype, x.shape[1], N, layout
    )


def default_plan(x: Tensor, N: int) -> Plan:
    return Plan("hopper", fused.COMM_ROWS, LONG)
