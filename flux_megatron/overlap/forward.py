"""Any pattern of a strategy as one whole call: for the tuner, and for operations that nothing
schedules in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace

if TYPE_CHECKING:
    from flux_megatron.overlap.registry import Strategy

# x, w, layout, plan, workspace -> y, without bias
Forward = Callable[[Tensor, Tensor, str, Plan, Workspace], Tensor]


def forward(strategy: Strategy, pattern: Pattern) -> Forward:
    """What layers schedule in pieces is put together; else the strategy's function of that name."""
    if pattern is COLUMN:
        return lambda x, w, layout, plan, space: strategy.ag_gemm(
            x, w, None, layout, plan, space, None
        )
    if pattern is ROW:
        return lambda x, w, layout, plan, space: strategy.start_gemm_rs(
            x, w, layout, plan, space
        ).finish()
    whole: Forward = getattr(strategy, pattern.value)
    return whole
