"""Models and adapters of real packages, on our layers beside stock ones, where they are installed.

peft's adapters read Megatron's layers as tensors from 0.14 on, which fails with stock layers too.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from packaging.version import Version
from post_training import EVEN, learn, log_probs
from ranks import FUSED
from test_adapters import WAYS, adapted_as_stock
from test_packed_training import SP, beside_stock
from test_te_specification import start

import flux_megatron

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class Held(torch.nn.Module):
    """A model whose configuration peft does not see: it expects a dictionary."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.held = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


def peft_is_for_megatron() -> bool:
    try:
        return Version(metadata.version("peft")) < Version("0.14")
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not peft_is_for_megatron(), reason="needs peft below 0.14")
@SP
@sbs.on_tp_ranks(2, environment=FUSED)
def test_adapters_of_peft(rank, sp):
    import peft

    def life(make: Any) -> list[torch.Tensor]:
        base = make()
        options = peft.LoraConfig(
            r=4, target_modules=LAYERS, megatron_config=copy.copy(base.config),
            megatron_core="megatron.core", init_lora_weights=False,
        )  # fmt: skip
        sbs.seed()
        model = peft.get_peft_model(Held(base), options)
        assert sum(type(m).__name__ == "LoraParallelLinear" for m in model.modules()) == 4
        seen = learn(model, EVEN[:3])
        unmerged = log_probs(model, (7, 3), 5)
        model.merge_adapter()
        return [*seen, unmerged, log_probs(model, (7, 3), 5)]

    beside_stock(sp, life)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def import_bridge() -> Any:
    """Its adapters ask for TransformerEngine when they are imported, and for its version later."""
    package = types.ModuleType("transformer_engine.pytorch")
    package.Linear, package.ops = type("Linear", (torch.nn.Linear,), {}), mock.MagicMock()
    sys.modules.update(
        {"transformer_engine": mock.MagicMock(pytorch=package), package.__name__: package}
    )
    from megatron.bridge.peft import lora, utils

    utils.version = lambda _: te.VERSION
    utils.TECL = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear)
    utils.TERL = (te.TERowParallelLinear,)
    return lora


@needs("megatron.bridge")
@WAYS
@sbs.on_tp_ranks(2, environment=FUSED)
def test_adapters_of_megatron_bridge(rank, way):
    start({})
    bridge = import_bridge()

    def adapted(model: Any) -> Any:
        sbs.seed()
        adapters = bridge.LoRA(target_modules=LAYERS, dim=4, lora_B_init_method="xavier")
        return adapters(model, training=True)

    adapted_as_stock(way, adapted)


@needs("megatron.bridge")
@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_models_of_megatron_bridge(rank, way):
    """Its provider builds them and wraps them in data parallelism."""
    start({})
    import_bridge()
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    def overlap(built: list[Any]) -> list[Any]:
        flux_megatron.replace(built)
        return built

    def provided(hook: Any = None) -> Any:
        sbs.seed()
        provider = GPTModelProvider(
            num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=32,
            seq_length=8, tensor_model_parallel_size=2, sequence_parallel=True,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
            gradient_accumulation_fusion=False, bias_activation_fusion=False,
            masked_softmax_fusion=False, apply_rope_fusion=False, make_vocab_size_divisible_by=2,
        )  # fmt: skip
        provider.finalize()
        if hook:
            provider.register_pre_wrap_hook(hook)
        (model,) = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(), use_cpu_initialization=True
        )
        return model

    def trained(model: Any) -> list[torch.Tensor]:
        loss, *_ = sbs.one_step(model)
        return [loss, *(parameter.main_grad for parameter in model.parameters())]

    expected = trained(provided())
    if way == "enable":
        flux_megatron.enable(strict=True)
    flux_megatron.reset_report()
    got = trained(provided(overlap if way == "replace" else None))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert sbs.overlapped() == 10
    flux_megatron.disable()


@needs("mbridge")
@sbs.on_tp_ranks(2, environment=FUSED)
def test_models_of_mbridge(rank):
    """Which verl builds models with."""
    start({})
    from mbridge import AutoBridge
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=8,
    )  # fmt: skip
    config.rope_theta, config.rope_scaling = 10000.0, None  # which transformers 5 has elsewhere

    def built() -> Any:
        sbs.seed()
        bridge = AutoBridge.from_config(config, dtype=torch.float32)
        bridge.set_extra_args(
            sequence_parallel=True, use_cpu_initialization=True, gradient_accumulation_fusion=False,
            bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        )  # fmt: skip
        (model,) = bridge.get_model(bf16=False, use_cpu_initialization=True)
        return model

    expected = sbs.one_step(built())
    flux_megatron.enable(strict=True)
    flux_megatron.reset_report()
    torch.testing.assert_close(sbs.one_step(built()), expected, atol=1e-6, rtol=1e-5)
    assert sbs.overlapped() == 10
    flux_megatron.disable()
