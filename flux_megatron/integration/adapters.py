"""Adapters around our layers with a norm inside: they are to read what the linear layer reads.

Frameworks ask TransformerEngine's layer for the norm's output, whose class ours is not.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear

ASKED_BY = "to_wrap"  # Megatron-Bridge's wrapper, which takes the norm's output if it is there
BLIND = "base_layer"  # peft's, which never does


def watch(model: Module) -> None:
    """From the model's first forward on, when its adapters are there, layers give them the norm's
    output. `ValueError` then for adapters that cannot take it.
    """
    model.register_forward_pre_hook(_ask)


def _ask(model: Module, _: Any) -> None:
    hooks = model._forward_pre_hooks  # those of a copy have this one too
    for key in [key for key, hook in hooks.items() if hook is _ask]:
        del hooks[key]
    for name, layer in model.named_modules():
        if not isinstance(layer, FluxLayerNormColumnParallelLinear):
            continue
        path, _, last = name.rpartition(".")
        if last == BLIND:
            raise ValueError(
                f"{path}: the adapter reads rows before the norm that is inside our layer, rows "
                "behind it expected: leave such layers out, as layers=['proj', 'fc2'] does"
            )
        if last == ASKED_BY:
            layer.return_layernorm_output = True
