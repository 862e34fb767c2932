"""Tensor-parallel linear layers and norms: torch only.

The modules are for plain PyTorch: see `docs/pytorch.md`. A name is imported at its first use.
Megatron's layers build on `functions` and `norm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "ColumnParallelLinear": "flux_megatron.nn.linear",
    "FluxColwiseParallel": "flux_megatron.nn.parallel_styles",
    "FluxRowwiseParallel": "flux_megatron.nn.parallel_styles",
    "RowParallelLinear": "flux_megatron.nn.linear",
    "ShardedEmbeddingBag": "flux_megatron.nn.embedding",
    "in_transformers": "flux_megatron.nn.hugging_face",
    "sharded_state_dict": "flux_megatron.nn.sharded_state",
    "sum_gradient": "flux_megatron.nn.replicated",
}

__all__ = [
    "ColumnParallelLinear",
    "FluxColwiseParallel",
    "FluxRowwiseParallel",
    "RowParallelLinear",
    "ShardedEmbeddingBag",
    "in_transformers",
    "sharded_state_dict",
    "sum_gradient",
]

if TYPE_CHECKING:
    from flux_megatron.nn.embedding import ShardedEmbeddingBag
    from flux_megatron.nn.hugging_face import in_transformers
    from flux_megatron.nn.linear import ColumnParallelLinear, RowParallelLinear
    from flux_megatron.nn.parallel_styles import FluxColwiseParallel, FluxRowwiseParallel
    from flux_megatron.nn.replicated import sum_gradient
    from flux_megatron.nn.sharded_state import sharded_state_dict


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
