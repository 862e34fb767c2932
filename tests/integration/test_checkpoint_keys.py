"""Distributed checkpoints: ours have the keys of the layers they stand for, so that both load both.

TransformerEngine is not here: stand-ins of its classes save what its own do, and Megatron's own
specification says where they stand.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")

import side_by_side as sbs
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from ranks import run_ranks

from flux_megatron.integration import install as door
from flux_megatron.integration.flags import add_flux_arguments
from flux_megatron.integration.norm import LayerNorm, RMSNorm

MODELS = {
    "LayerNorm": {},
    "RMSNorm, qk": {"normalization": "RMSNorm", "qk_layernorm": True},
    "MTP": {"normalization": "RMSNorm", "mtp_num_layers": 1},
    "experts": {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "mtp_num_layers": 1,
                "add_bias_linear": False},
}  # fmt: skip
ALONE = {
    "LayerNorm": {"decoder.final_layernorm"},
    "RMSNorm, qk": {"decoder.final_layernorm", "decoder.layers.self_attention.q_layernorm",
                    "decoder.layers.self_attention.k_layernorm"},
    "MTP": {"decoder.final_layernorm",
            *(f"mtp.layers.0.{norm}" for norm in ("enorm", "hnorm", "final_layernorm"))},
    "experts": {"decoder.final_layernorm", "decoder.layers.1.pre_mlp_layernorm",
                "mtp.layers.0.transformer_layer.pre_mlp_layernorm",
                *(f"mtp.layers.0.{norm}" for norm in ("enorm", "hnorm", "final_layernorm"))},
}  # fmt: skip


class _State:
    """As TransformerEngine 2 without FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class Norm(_State, torch.nn.Module):
    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))


class NormAndLinear(_State, ColumnParallelLinear):
    def __init__(self, input_size: int, *given: Any, config: Any, **named: Any) -> None:
        super().__init__(input_size, *given, config=config, **named)
        for name, parameter in Norm(config, input_size).named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)


class Column(_State, ColumnParallelLinear):
    pass


class Row(_State, RowParallelLinear):
    pass


def pretend_te() -> None:
    """In this process Megatron finds the stand-ins, and a GPU for them."""
    theirs = transformer_engine_spec_provider
    theirs.TENorm, theirs.TELayerNormColumnParallelLinear = Norm, NormAndLinear
    theirs.TEColumnParallelLinear, theirs.TERowParallelLinear = Column, Row
    # which saves no state either
    theirs.TEDotProductAttention = transformer_engine.TEDotProductAttention = DotProductAttention
    theirs.is_te_min_version = lambda *_: True
    gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = theirs.TESpecProvider, Norm
    transformer_block.LayerNormImpl = transformer_engine.TENorm = Norm
    transformer_engine.HAVE_TE = True
    torch.cuda.is_available = lambda: True


def overlap(transformer_impl: str) -> None:
    """Installs us as a launch does that parses twice, the second time what the first one left."""
    args = add_flux_arguments(argparse.ArgumentParser()).parse_args(["--flux-overlap"])
    args.transformer_impl = transformer_impl
    for _ in range(2):
        door.install_from(args)
        assert args.transformer_impl == "local"


def model(of_te: bool, more: dict, alike: bool = False) -> GPTModel:
    """A model as Megatron specifies it now; `alike`: by one layer, without a final norm."""
    config = sbs.settings(1, False, torch.float32, **{"num_layers": 2, **more})
    if alike:
        options = {"qk_layernorm": config.qk_layernorm}
        spec = (
            gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options) if of_te else
            gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization, **options)
        )  # fmt: skip
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, of_te, config.normalization)
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, of_te)
    built = GPTModel(config=config, transformer_layer_spec=spec, mtp_block_spec=mtp,
                     vocab_size=8, max_sequence_length=8)  # fmt: skip
    generator = torch.Generator().manual_seed(len(more) + of_te)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return built


def keys(built: GPTModel) -> set[str]:
    return {part.key for part in built.sharded_state_dict().values()}


def with_state(built: GPTModel) -> set[str]:
    """The norms that save an `_extra_state`."""
    state = "._extra_state"
    return {key.removesuffix(state) for key in keys(built) if key.endswith(f"norm{state}")}


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_those_of_transformer_engine_s_layers(name):
    run_ranks(_keys_of_te, 1, name)


def _keys_of_te(rank: int, name: str) -> None:
    sbs.start(1)
    pretend_te()
    alike = [False, True] if name in ("LayerNorm", "RMSNorm, qk") else [False]
    stock = [model(True, MODELS[name], each) for each in alike]
    overlap("transformer_engine")
    for each, theirs in zip(alike, stock, strict=True):
        ours = model(False, MODELS[name], each)
        assert keys(ours) == keys(theirs)
        assert with_state(ours) == ALONE[name]
        assert isinstance(ours.decoder.layers[0].input_layernorm, LayerNorm | RMSNorm)
        assert isinstance(ours.decoder.layers[0].pre_mlp_layernorm, LayerNorm | RMSNorm)
        after = model(True, MODELS[name], each)  # another model of this process stays as it is
        assert keys(after) == keys(theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("installed", [True, False])
def test_keys_are_those_of_local_layers(name, installed):
    run_ranks(_keys_of_local, 1, name, installed)


def _keys_of_local(rank: int, name: str, installed: bool) -> None:
    sbs.start(1)
    stock = model(False, MODELS[name])
    if installed:
        pretend_te()
        of_one_layer = model(False, {}, alike=True)
    overlap("local" if installed else "transformer_engine")
    ours = model(False, MODELS[name])
    assert keys(ours) == keys(stock)
    assert with_state(ours) == set()
    if installed:  # Megatron takes Transformer Engine's for the final norm of such models
        ours = model(False, {}, alike=True)
        assert keys(ours) == keys(of_one_layer)
        assert with_state(ours) == {"decoder.final_layernorm"}


@pytest.mark.parametrize("name", ["RMSNorm, qk", "experts"])
def test_both_load_both(name, tmp_path):
    run_ranks(_both_ways, 1, name, tmp_path)


def _both_ways(rank: int, name: str, folder: Any) -> None:
    sbs.start(1)
    pretend_te()
    theirs = model(True, MODELS[name])
    overlap("transformer_engine")
    ours = model(False, MODELS[name])
    torch.cuda.is_available = lambda: False  # writing would use it
    with _writers():
        for step, (source, target) in enumerate([(theirs, ours), (ours, theirs)]):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.add_(1)
            place = folder / str(step)
            place.mkdir()
            dist_checkpointing.save(source.sharded_state_dict(), str(place))
            state = dist_checkpointing.load(target.sharded_state_dict(), str(place))
            target.load_state_dict(state)
            saved, loaded = _weights(source), _weights(target)
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(saved[key], loaded[key]) for key in saved)


@contextlib.contextmanager
def _writers() -> Iterator[None]:
    """megatron-core may start processes, and forks the one that collects what they say."""
    multiprocessing.current_process()._config["daemon"] = False
    answers = multiprocessing.get_context("fork").Manager()
    filesystem_async._results_queue = answers.Queue()
    try:
        yield
    finally:
        answers.shutdown()


def _weights(built: GPTModel) -> dict[tuple, torch.Tensor]:
    """By name in the checkpoint, and layer."""
    parts = built.sharded_state_dict().values()
    return {
        (part.key, part.global_offset): part.data
        for part in parts
        if isinstance(part.data, torch.Tensor) and not part.key.endswith("_extra_state")
    }
