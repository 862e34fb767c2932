"""Tensor-parallel linear layers for Megatron that hide their communication behind their GEMMs.

Public names are loaded when they are first used: importing the package imports neither torch nor
triton nor megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flux_megatron import settings as _settings
from flux_megatron.version import __version__ as __version__

_PLACES = {
    "ColumnParallelLinear": ("flux_megatron.integration.layers", "FluxColumnParallelLinear"),
    "RowParallelLinear": ("flux_megatron.integration.layers", "FluxRowParallelLinear"),
    "Plan": ("flux_megatron.problem", "Plan"),
    "Tile": ("flux_megatron.problem", "Tile"),
    "a2a_gemm": ("flux_megatron.expert_parallel.ops", "a2a_gemm"),
    "all_gather_gemm": ("flux_megatron.ops", "all_gather_gemm"),
    "gemm_a2a": ("flux_megatron.expert_parallel.ops", "gemm_a2a"),
    "gemm_all_reduce": ("flux_megatron.ops", "gemm_all_reduce"),
    "gemm_reduce_scatter": ("flux_megatron.ops", "gemm_reduce_scatter"),
    "embedding_all_to_all": ("flux_megatron.embedding.operation", "embedding_all_to_all"),
    "gemv_all_reduce": ("flux_megatron.ops", "gemv_all_reduce"),
    "disable": ("flux_megatron.integration.enabling", "disable"),
    "enable": ("flux_megatron.integration.enabling", "enable"),
    "replace": ("flux_megatron.integration.replacing", "replace"),
    "check": ("flux_megatron.symm.workspaces", "check"),
    "confirm_step": ("flux_megatron.symm.step_end", "confirm_step"),
    "release": ("flux_megatron.symm.workspaces", "release"),
    "report": ("flux_megatron.overlap.report", "report"),
    "reset_report": ("flux_megatron.overlap.report", "reset_report"),
    "synchronize": ("flux_megatron.symm.step_end", "synchronize"),
}

__all__ = [
    "ColumnParallelLinear",
    "Plan",
    "RowParallelLinear",
    "Tile",
    "a2a_gemm",
    "all_gather_gemm",
    "check",
    "confirm_step",
    "disable",
    "embedding_all_to_all",
    "enable",
    "gemm_a2a",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "gemv_all_reduce",
    "release",
    "replace",
    "report",
    "reset_report",
    "synchronize",
]

if TYPE_CHECKING:
    from flux_megatron.embedding.operation import embedding_all_to_all
    from flux_megatron.expert_parallel.ops import a2a_gemm, gemm_a2a
    from flux_megatron.integration.enabling import disable, enable
    from flux_megatron.integration.layers import FluxColumnParallelLinear as ColumnParallelLinear
    from flux_megatron.integration.layers import FluxRowParallelLinear as RowParallelLinear
    from flux_megatron.integration.replacing import replace
    from flux_megatron.ops import (
        all_gather_gemm,
        gemm_all_reduce,
        gemm_reduce_scatter,
        gemv_all_reduce,
    )
    from flux_megatron.overlap.report import report, reset_report
    from flux_megatron.problem import Plan, Tile
    from flux_megatron.symm.step_end import confirm_step, synchronize
    from flux_megatron.symm.workspaces import check, release


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    if module.startswith("flux_megatron.integration"):  # which imports megatron
        importlib.import_module("flux_megatron.versions.megatron_core").check()
    return getattr(importlib.import_module(module), attribute)


def arm() -> None:
    """Do what FLUX_MEGATRON_ENABLE asks for: `integration.autoload`. torch calls it at the end of
    its import, which fails in every program where this raises.
    """
    if _settings.enabled():
        autoload = importlib.import_module("flux_megatron.integration.autoload")
        autoload.arm(lambda: __getattr__("enable")())  # which imports megatron


arm()
