"""What megatron-core's layer specifications are built from: its `BackendSpecProvider` seam.

It has what Megatron's local layers lack: norms for sequence parallelism and attention without
stored scores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider

from flux_megatron.integration import stand_ins
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.norm import FluxNorm


class StockSpecProvider(LocalSpecProvider):
    """megatron-core's own linears, with a norm that allows sequence parallelism."""

    def layer_norm(self, *_: Any, **__: Any) -> type:
        return FluxNorm

    def core_attention(self) -> type:
        """Transformer Engine's attention where it can run, which alone does context parallelism;
        else torch's, which keeps no [s, s] scores.
        """
        return transformer_engine.TEDotProductAttention if te_can_run() else FluxCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        """Experts as one grouped GEMM are Transformer Engine's where it can run, as without us:
        they leave communication to their token dispatcher.
        """
        if moe_use_grouped_gemm and te_can_run():
            return TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm, *args, **kwargs)
        return super().grouped_mlp_modules(moe_use_grouped_gemm, *args, **kwargs)


class FluxSpecProvider(StockSpecProvider):
    """This package's linears, for code that names a provider; in experts too, where they gain wgrad
    fusion without apex.
    """

    def column_parallel_linear(self) -> type:
        return stand_ins.ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return stand_ins.RowParallelLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        experts = super().grouped_mlp_modules(moe_use_grouped_gemm, *args, **kwargs)
        if moe_use_grouped_gemm and te_can_run():
            return experts
        if isinstance(experts, functools.partial):  # newer than 0.16
            submodules = _ours(experts.keywords["submodules"])
            return functools.partial(experts.func, **{**experts.keywords, "submodules": submodules})
        experts, submodules = experts
        return experts, submodules and _ours(submodules)


def te_can_run() -> bool:
    """Whether Transformer Engine is installed and there is a GPU."""
    return transformer_engine.HAVE_TE and torch.cuda.is_available()


def _ours(submodules: Any) -> Any:
    return dataclasses.replace(
        submodules,
        linear_fc1=stand_ins.ColumnParallelLinear,
        linear_fc2=stand_ins.RowParallelLinear,
    )
