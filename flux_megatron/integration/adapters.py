"""Adapters around our layers with a norm inside: they are to read what the linear layer reads.

Frameworks ask TransformerEngine's layer for the norm's output, whose class ours is not.
"""

from __future__ import annotations

from functools import cache

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear

ASKED_BY = "to_wrap"  # Megatron-Bridge's wrapper, which takes the norm's output if it is there
BLIND = "base_layer"  # peft's, which never does


@cache
def watch() -> None:
    """From now on whoever wraps such a layer gets the norm's output, or `ValueError` if it cannot
    take that. Layers of ours outlive `disable`, so this does too.
    """
    register_module_module_registration_hook(_ask)


def ask(model: Module) -> None:
    """The same of wrappers that are there already."""
    for wrapper in model.modules():
        for name, layer in wrapper.named_children():
            _ask(wrapper, name, layer)


def _ask(wrapper: Module, name: str, layer: Module | None) -> None:
    if not isinstance(layer, FluxLayerNormColumnParallelLinear):
        return
    if name == BLIND:
        raise ValueError(
            f"{type(wrapper).__name__}: the adapter reads rows before the norm that is inside our "
            "layer, rows behind it expected: leave such layers out, as layers=['proj', 'fc2'] does"
        )
    if name == ASKED_BY:
        layer.return_layernorm_output = True
