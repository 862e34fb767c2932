"""How Megatron-FSDP takes the parameters of our layers: as shards of tensor parallelism.

From 0.18 on it goes by the names of classes, so that subclasses are none: it would take the weight
of a layer with a norm for a norm's, which all ranks have, and know nothing of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
from flux_megatron.integration.replaced import around

ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
DETECT = "_detect_parallelism_type"


def name_our_layers() -> None:
    """Let every class of Megatron's that has such names know ours. Another call changes nothing."""
    try:
        adapter = importlib.import_module(ADAPTER)
    except ImportError:
        return
    for kind in vars(adapter).values():
        if isinstance(kind, type) and DETECT in vars(kind):
            around(kind, DETECT)(_knowing_ours)


def parallelism_of(parameter: str, module: Any) -> str | None:
    """`column`, `row` or `replicated` for a parameter of our layers; None for other modules."""
    if isinstance(module, FluxColumnParallelLinear):
        return "replicated" if parameter.startswith("layer_norm_") else "column"
    if isinstance(module, FluxRowParallelLinear):
        return "replicated" if parameter == "bias" else "row"
    return None


def _knowing_ours(
    detect: Callable[..., str | None], self: Any, param_name: str, module: Any
) -> str | None:
    return parallelism_of(param_name, module) or detect(self, param_name, module)
