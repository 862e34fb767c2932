"""Norms where TransformerEngine's layers have them, so that checkpoints have the same keys.

A norm that those layers compute within a linear layer is saved with it, without a state of its own.
A norm that stands alone has its own name, and an `_extra_state` that only TransformerEngine's class
saves and asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import StockSpecProvider


class _NormsAlone:
    """For a provider: the norms that Megatron takes beside TransformerEngine's linears."""

    def layer_norm(self, *given: Any, **named: Any) -> Any:
        theirs = transformer_engine_spec_provider.TESpecProvider()
        return theirs.layer_norm(*given, **named)


def with_norms_alone(provider: type[StockSpecProvider]) -> type[StockSpecProvider]:
    """This provider with TransformerEngine's norms; `LayerOfTE` replaces those within linears."""
    return type("Provider", (_NormsAlone, provider), {})


@dataclass
class LayerOfTE(TransformerLayerSubmodules):
    """The parts of a local layer, saved under the names that TransformerEngine's layer has.

    Megatron's local layer names both its norms after the linear layer behind them: those are
    `FluxNorm`. With experts the second one stands alone, so it keeps its name and class.
    """

    def __post_init__(self) -> None:
        keys: dict[str, str] = self.sharded_state_dict_keys_map  # made for this layer
        if _class_of(self.mlp) is MoELayer:
            keys.pop("pre_mlp_layernorm.", None)
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            if f"{norm}." in keys:
                setattr(self, norm, FluxNorm)


def _class_of(spec: Any) -> Any:
    """What a `ModuleSpec` builds, or what is a partial in newer versions."""
    return getattr(spec, "module", None) or getattr(spec, "func", None)
