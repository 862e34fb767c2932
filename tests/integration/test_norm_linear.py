"""Our norm and linear layer in one module beside the stand-in for TransformerEngine's."""

from __future__ import annotations

from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch

from flux_megatron import report
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear

CONFIGS = {
    "LayerNorm": {},
    "RMSNorm": {"normalization": "RMSNorm"},
    "zero-centered": {"layernorm_zero_centered_gamma": True},
    "RMSNorm, zero-centered": {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
    "eps": {"layernorm_epsilon": 0.5},
    "fusion": {"gradient_accumulation_fusion": True},
}
TOLERANCE = 1e-5


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@sbs.on_tp_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})  # the quickest
def test_outputs_and_gradients_are_those_of_transformer_engine_s_layer(rank, name, save_gathered):
    te.pretend_te()
    given = sbs.settings(2, True, torch.float32, **CONFIGS[name])
    theirs = built(te.TELayerNormColumnParallelLinear, given)
    own = built(FluxLayerNormColumnParallelLinear, given)
    own.save_gathered = save_gathered
    fused = given.gradient_accumulation_fusion
    if fused:
        own.weight.main_grad = torch.zeros_like(own.weight, dtype=torch.float32)
    case = sbs.Case("column")
    x, dy = sbs.operands(case, True)
    expected, found = (sbs.use(case, layer, x, dy) for layer in (theirs, own))
    if fused:
        found["dw"], found["main_grad"] = found["main_grad"], None
    for part, value in expected.items():
        close(found[part], value)
    for which, parameter in theirs.named_parameters():
        if which.startswith("layer_norm"):
            close(getattr(own, which).grad, parameter.grad)
    done = report()
    assert done.overlapped == done.total > 0


def built(layer: type, config: Any) -> Any:
    """With parameters that are no ones and zeros."""
    sbs.seed()
    made = layer(
        sbs.HIDDEN, sbs.FFN, config=config, init_method=torch.nn.init.xavier_normal_,
        gather_output=False, bias=True, skip_bias_add=False, is_expert=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if name != "weight":
            torch.nn.init.normal_(parameter, generator=generator)
    return made


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
