"""The norm: megatron-core's values, the tag of sequence parallelism, what megatron-core refuses."""

from __future__ import annotations

from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

import flux_megatron
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear

H = 24


def config(**more) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, use_cpu_initialization=True, **more
    )


def randomize(norm: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(H, generator=generator))
    return norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_values_and_state_are_stocks(normalization):
    settings = config(normalization=normalization)
    ours = randomize(FluxNorm(settings, H, eps=1e-4))
    theirs = WrappedTorchNorm(settings, H, eps=1e-4)
    theirs.load_state_dict(ours.state_dict())
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    x = torch.randn(3, 2, H)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_gamma_stands_for_one_plus_weight(normalization, dtype):
    centered = config(
        normalization=normalization, layernorm_zero_centered_gamma=True, params_dtype=dtype
    )
    norm = FluxNorm(centered, H)
    assert not norm.weight.any()
    plain = FluxNorm(config(normalization=normalization), H)
    randomize(norm)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(getattr(norm, name).float() + (name == "weight"))
    x = torch.randn(3, 2, H).to(dtype)
    assert torch.equal(norm(x), plain(x.float()).to(dtype))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_kernels_are_given_what_the_module_holds(normalization, centered, monkeypatch):
    """On queries [s, b, heads, head size], interpreted."""
    settings = config(normalization=normalization, layernorm_zero_centered_gamma=centered)
    norm = randomize(FluxNorm(settings, H, eps=0.5))
    x = torch.randn(3, 2, 4, H)
    expected = norm(x)
    monkeypatch.setattr("flux_megatron.nn.norm.INTERPRET", True)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)
    norm(x).sum().backward()
    assert all(p.grad.shape == (H,) and p.grad.any() for p in norm.parameters())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_parameters_are_tagged(normalization, sequence_parallel):
    settings = config(
        normalization=normalization, tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel, persist_layer_norm=True,
        memory_efficient_layer_norm=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    parameters = [*FluxNorm(config=settings, hidden_size=H, eps=1e-5).parameters()]
    assert len(parameters) == (2 if normalization == "LayerNorm" else 1)
    assert all(p.sequence_parallel is sequence_parallel for p in parameters)
    assert all(p.dtype is torch.bfloat16 for p in parameters)


def test_other_norms_are_refused():
    settings = config()
    settings.normalization = "BatchNorm"
    with pytest.raises(ValueError, match=r"'BatchNorm', one of \['LayerNorm', 'RMSNorm'\]"):
        FluxNorm(settings, H)


def test_enable_leaves_other_norms_to_megatron():
    settings = config()
    settings.normalization = "BatchNorm"
    flux_megatron.enable()
    try:
        with pytest.raises(Exception, match="Only LayerNorm"):
            WrappedTorchNorm(settings, H)
    finally:
        flux_megatron.disable()


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
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    norms = [[p.grad for n, p in each.named_parameters() if n[:10] == "layer_norm"]
             for each in (own, theirs)]  # fmt: skip
    torch.testing.assert_close(*norms, atol=TOLERANCE, rtol=TOLERANCE)
    sbs.overlapped()


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
