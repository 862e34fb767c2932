"""Megatron-core's seams: layers, norm, provider and specs.

Only here and in `train` above is megatron imported. Public names are loaded when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "FluxColumnParallelLinear": "layers",
    "FluxRowParallelLinear": "layers",
    "FluxNorm": "norm",
    "FluxSpecProvider": "provider",
    "gpt_block_spec": "specs",
    "gpt_layer_spec": "specs",
    "use_flux_output_layer": "specs",
}

__all__ = [
    "FluxColumnParallelLinear",
    "FluxNorm",
    "FluxRowParallelLinear",
    "FluxSpecProvider",
    "gpt_block_spec",
    "gpt_layer_spec",
    "use_flux_output_layer",
]

if TYPE_CHECKING:
    from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
    from flux_megatron.integration.norm import FluxNorm
    from flux_megatron.integration.provider import FluxSpecProvider
    from flux_megatron.integration.specs import (
        gpt_block_spec,
        gpt_layer_spec,
        use_flux_output_layer,
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
