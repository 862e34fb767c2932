"""Gated delta nets beside attention, as in Qwen3-Next: their two linear layers become ours."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import test_enabling_fp8 as fp8
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from ranks import FUSED, on_cpu_ranks
from test_te_specification import parameters, sharded
from torch import Tensor

import flux_megatron
from flux_megatron.integration import coverage

nets = pytest.importorskip(
    "megatron.core.ssm.gated_delta_net", reason="megatron-core has them from 0.16 on"
)

specs = sys.modules[te.VARIANTS]
VOCAB, SEQUENCE, BATCH = 64, 8, 2
TOTAL = 9  # those of one net and one layer of attention, each with an MLP, and the LM head
SIZES = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip
SINCE_0_20 = pytest.mark.skipif(not hasattr(specs, "GDN_ATTENTION_VARIANTS"), reason="from 0.20 on")
WAYS = ("--flux-overlap", "enable", "replace")


# What lies between the linear layers is stock's and ours: here each token by itself.


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: Any
) -> tuple[Tensor, None]:
    """[batch, length, channels] -> the same."""
    return F.silu(x * weight[:, -1]), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """q, k [batch, length, heads, keys], v of values; g and beta [batch, length, heads]."""
    return (q * k).sum(-1, keepdim=True) * (g.exp() * beta)[..., None] * v, None


def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The same with a decay g and gates b and w of each channel."""
    return (q * g.exp() * b * k).sum(-1, keepdim=True) * w * v, None


def install_fla() -> None:
    """Stand for flash-linear-attention in Megatron's modules: one, or from 0.19 on several."""
    theirs = {function.__name__: function for function in (
        l2norm, causal_conv1d, chunk_gated_delta_rule, chunk_gdn2
    )}  # fmt: skip
    theirs |= {"HAVE_FLA": True, "HAVE_FLA_GDN2": True}
    for name, module in list(sys.modules.items()):
        if name.startswith(nets.__name__):
            vars(module).update(theirs)


def build(sp: bool, delayed: bool = False, **more: Any) -> GPTModel:
    sbs.seed()
    given = {"experimental_attention_variant": "gated_delta_net", **more}
    config = sbs.settings(
        2, sp, torch.float32,
        **{"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_query_groups": 2,
           "normalization": "RMSNorm", "layernorm_zero_centered_gamma": True,
           "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
           "qk_layernorm": True, "attention_output_gate": True,
           "transformer_impl": "transformer_engine", "linear_attention_freq": 2, **SIZES, **given},
    )  # fmt: skip
    config.delay_wgrad_compute = delayed  # behind checks of what stands around the layers
    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, spec, VOCAB, SEQUENCE, position_embedding_type="rope")


def start() -> None:
    flux_megatron.disable()
    torch.compiler.set_stance("force_eager")  # Megatron compiles the norm behind a net
    sbs.start(2)
    te.pretend_te()
    install_fla()


def with_ours(way: str, sp: bool, chosen: tuple[str, ...], **more: Any) -> GPTModel:
    if way == "--flux-overlap":
        assert te.overlap(*(("--flux-layers", *chosen) if chosen else ()))
        return build(sp, **more)
    return sbs.with_ours(way, lambda: build(sp, **more), layers=chosen or None)


def step(model: GPTModel) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return sbs.one_step(model, torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator))


@pytest.mark.parametrize(
    ("way", "sp", "chosen", "variant"),
    [
        *((way, sp, (), "gated_delta_net") for way in WAYS for sp in (True, False)),
        *((way, True, ("fc1",), "gated_delta_net") for way in WAYS),
        pytest.param(WAYS[0], True, (), "gdn2", marks=SINCE_0_20),
    ],
)
@on_cpu_ranks(2)
def test_a_model_follows_stock(rank, way, sp, chosen, variant):
    """Its layers are chosen as those of an MLP; gdn2 has gates of each channel."""
    start()
    stock = build(sp, experimental_attention_variant=variant)
    expected = step(stock)
    ours = with_ours(way, sp, chosen, experimental_attention_variant=variant)
    flux_megatron.reset_report()
    assert parameters(stock) == parameters(ours)
    assert sharded(stock) == sharded(ours)
    torch.testing.assert_close(step(ours), expected, atol=1e-6, rtol=1e-5)
    layers, report = coverage.layers_of([ours], chosen or None), flux_megatron.report()
    assert (layers.ours, layers.total) == (3 if chosen else TOTAL, TOTAL), layers
    assert {why for _, why in layers.others} <= {coverage.NOT_CHOSEN}
    assert report.overlapped == report.total >= layers.ours


@pytest.mark.skipif(not hasattr(nets.GatedDeltaNet, "backward_dw"), reason="from 0.17 on")
@on_cpu_ranks(2)
def test_its_delayed_gradients_are_stock_s(rank):
    start()
    expected = step(build(True))
    model = with_ours("enable", True, (), delayed=True)
    step(model)
    late = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert {f"decoder.layers.0.self_attention.{n}_proj.weight" for n in ("in", "out")} <= late
    for layer in model.decoder.layers:
        layer.self_attention.backward_dw()
        layer.mlp.backward_dw()
    now = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(now, expected[1:], atol=1e-6, rtol=1e-5)


class Net(torch.nn.Module):
    """By itself, of TransformerEngine's layers that compute in FP8."""

    def __init__(self) -> None:
        super().__init__()
        submodules = nets.GatedDeltaNetSubmodules(
            in_proj=transformer_engine.TELayerNormColumnParallelLinear, out_norm=IdentityOp,
            out_proj=transformer_engine.TERowParallelLinear,
        )  # fmt: skip
        config = fp8.config(activation_func=F.silu, **{**SIZES, "linear_num_value_heads": 8})
        groups = types.SimpleNamespace(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
        )
        self.net = nets.GatedDeltaNet(config, submodules, 1, pg_collection=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, None)[0]


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2, environment={**FUSED, "FLUX_MEGATRON_STRICT": "1"})
def test_a_net_in_fp8_follows_stock(rank, way):
    torch.compiler.set_stance("force_eager")
    fp8.pretend()
    install_fla()
    sbs.seed()
    expected = fp8.step(Net(), rank)
    if way == "enable":
        flux_megatron.enable()
    sbs.seed()
    model = Net()
    if way == "replace":
        assert flux_megatron.replace(model).ours == 2
    flux_megatron.reset_report()
    for one, other in zip(fp8.step(model, rank), expected, strict=True):
        assert sbs.relative_error(one, other) <= 1e-6
    assert sbs.overlapped() == 4
