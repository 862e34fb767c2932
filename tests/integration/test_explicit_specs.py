"""T5, BERT and hybrid models: their specifications name classes, which become ours."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.mamba import mamba_layer_specs, mamba_model
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.transformer import transformer_block
from ranks import run_ranks
from torch import Tensor

import flux_megatron
from flux_megatron.integration import building, coverage, install
from flux_megatron.integration.norm import FluxNorm

T5_ASKS_FOR_TE = "T5's local specification has a norm of TransformerEngine"
VOCAB, SEQUENCE, BATCH = 64, 8, 2
SHAPE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}


def t5(config: Any) -> Any:
    encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
    decoder = t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers)
    return T5Model(
        config=config, encoder_config=config, transformer_encoder_layer_spec=encoder,
        transformer_decoder_layer_spec=decoder, vocab_size=VOCAB, max_sequence_length=SEQUENCE,
    )  # fmt: skip


def bert(config: Any) -> Any:
    transformer_block.LayerNormImpl = FluxNorm  # the final one, as a launch sets it
    return BertModel(
        config=config, num_tokentypes=0, vocab_size=VOCAB, max_sequence_length=SEQUENCE,
        transformer_layer_spec=bert_layer_specs.bert_layer_local_spec,
    )  # fmt: skip


def inputs(model: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (3, BATCH, SEQUENCE), generator=generator)
    seen = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    if isinstance(model, T5Model):
        return tokens[0], tokens[1], seen, seen, seen, tokens[2]
    return tokens[0], torch.ones(BATCH, SEQUENCE, dtype=torch.long), None, tokens[2]


MODELS = {"T5": (t5, 23), "BERT": (bert, 9)}  # and the number of their linear layers


@pytest.mark.parametrize("name", MODELS)
def test_a_model_follows_stock_and_its_layers_are_ours(name):
    if name == "T5":
        sbs.skip_before("0.16", T5_ASKS_FOR_TE)
    alone = run_ranks(_loss_and_gradient, 1, name, False)
    stock = run_ranks(_loss_and_gradient, 2, name, False)
    ours = run_ranks(_loss_and_gradient, 2, name, True)
    for results in (stock, ours):
        for loss, gradient, *_ in results:
            assert abs(loss - alone[0][0]) <= 1e-5
            assert abs(gradient - alone[0][1]) <= 1e-5
    for *_, layers, report in ours:
        assert (layers.ours, layers.total) == (MODELS[name][1],) * 2, layers
        assert report.overlapped == report.total > 2 * layers.total - 2


def launched(name: str, *flags: str) -> Any:
    install.install_from(sbs.parse("--flux-overlap", "--transformer-impl", "local", *flags))
    return built(name)


def built(name: str) -> Any:
    tp = dist.get_world_size()
    return MODELS[name][0](sbs.settings(tp, tp > 1, torch.float32, **SHAPE))


def _loss_and_gradient(rank: int, name: str, ours: bool) -> tuple[Any, ...]:
    """The norm of the gradient of the words' embeddings, which all of the model has part in."""
    sbs.start(dist.get_world_size())
    sbs.seed()
    with contextlib.nullcontext() if ours else building.norms():
        model = launched(name) if ours else built(name)
    result = model(*inputs(model))
    loss = (result[0] if isinstance(result, tuple) else result).mean()
    loss.backward()
    weight = model.embedding.word_embeddings.weight.grad.square().sum()
    dist.all_reduce(weight)
    return loss.item(), weight.item(), coverage.layers_of([model]), flux_megatron.report()


def _specifications_anew() -> Any:
    """Newer modules of the old name take them from another."""
    if elsewhere := sys.modules.get("megatron.core.models.hybrid.hybrid_layer_specs"):
        importlib.reload(elsewhere)
    return importlib.reload(mamba_layer_specs)


class RMSNorm(torch.nn.Module):
    """Of groups of channels."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups * scale).flatten(-2) * self.weight


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, A: Tensor,
    D: Tensor, chunk_size: int, activation: str, headdim: int, ngroups: int, **_: Any,
) -> Tensor:  # fmt: skip
    """[batch, length, z x B C dt] -> [batch, length, heads * headdim], each token by itself: what
    lies between the linear layers is stock's and ours.
    """
    z, x = zxbcdt.split(len(A) * headdim, -1)[:2]
    dt = F.softplus(zxbcdt[..., -len(A) :] + dt_bias)
    return x * F.silu(z) * (torch.exp(dt * A) + D).repeat_interleave(headdim, -1)


def rearrange(x: Tensor, pattern: str) -> Tensor:
    """einops' for another order of axes, without those of size 1."""
    before, after = (side.split() for side in pattern.split("->"))
    x = x.squeeze([n for n, name in enumerate(before) if name == "1"])
    named = [name for name in before if name != "1"]
    return x.permute([named.index(name) for name in after])


def install_mamba(*modules: Any) -> None:
    """Be mamba_ssm and, where it is not there, einops, for these modules, which come anew."""
    names = {
        "layernorm_gated": {"RMSNorm": RMSNorm},
        "ssd_combined": {
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
            "mamba_chunk_scan_combined": None,
        },
        "selective_state_update": {"selective_state_update": None},
    }
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    for name, members in names.items():
        module = types.ModuleType(f"mamba_ssm.ops.triton.{name}")
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].__dict__.update(rearrange=rearrange, repeat=None)
    for module in modules:
        importlib.reload(module)


@pytest.mark.parametrize("flags", [(), ("--flux-layers", "qkv", "proj")])
@sbs.on_tp_ranks(2)
def test_a_hybrid_model_follows_stock(rank, flags):
    """Its attention, its MLP and its mixer."""
    te_stand_ins.pretend_te()
    install_mamba(mamba_context_parallel, mamba_mixer)
    module = _specifications_anew()
    found: list[Any] = []
    for ours in (False, True):
        sbs.seed()
        if ours:
            assert te_stand_ins.overlap(*flags)
            flux_megatron.reset_report()
        config = sbs.settings(
            2, True, torch.float32, **{**SHAPE, "num_layers": 3}, mamba_num_groups=2,
                              mamba_state_dim=4, mamba_head_dim=8)  # fmt: skip
        model = mamba_model.MambaModel(
            config=config, mamba_stack_spec=module.mamba_stack_spec, vocab_size=VOCAB,
            max_sequence_length=SEQUENCE, hybrid_override_pattern="M*-",
        )  # fmt: skip
        tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
        found.append(sbs.one_step(model, tokens))
    stock, flux = found
    torch.testing.assert_close(flux, stock, atol=1e-6, rtol=1e-5)
    layers, report = coverage.layers_of([model], flags[1:] or None), flux_megatron.report()
    assert (layers.ours, layers.total) == (2 if flags else 7, 7), layers
    assert report.overlapped == report.total == 2 * layers.ours


@pytest.mark.parametrize("name", MODELS)
def test_chosen_layers_are_ours(name):
    if name == "T5":
        sbs.skip_before("0.16", T5_ASKS_FOR_TE)
    run_ranks(_chosen, 2, name)


def _chosen(rank: int, name: str) -> None:
    sbs.start(2)
    assert sbs.ours(launched(name, "--flux-layers", "fc1")) == {"linear_fc1"}
