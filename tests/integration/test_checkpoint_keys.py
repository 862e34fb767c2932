"""Distributed checkpoints: ours have the keys of the layers they stand for, so that both load both.

TransformerEngine is not here: te_stand_ins.py. With its layers every key is compared in
test_te_specification.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator

import pytest

pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")

import side_by_side as sbs
import te_stand_ins as te
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from ranks import run_ranks
from spec_shapes import skip_where_mtp_needs_te

MODELS = {
    "LayerNorm": {},
    "RMSNorm, qk": {"normalization": "RMSNorm", "qk_layernorm": True},
    "MTP": {"normalization": "RMSNorm", "mtp_num_layers": 1},
    "experts": {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "mtp_num_layers": 1,
                "add_bias_linear": False},
}  # fmt: skip


def model(of_te: bool, more: dict, alike: bool = False) -> GPTModel:
    """A model as Megatron specifies it now; `alike`: by one layer, without a final norm."""
    config = sbs.settings(1, False, torch.float32, **{"num_layers": 2, **more})
    if alike:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, of_te, config.normalization)
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, of_te)
    built = GPTModel(config=config, transformer_layer_spec=spec, mtp_block_spec=mtp,
                     vocab_size=8, max_sequence_length=8)  # fmt: skip
    generator = torch.Generator().manual_seed(len(more))
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
@pytest.mark.parametrize("installed", [True, False])
def test_keys_are_those_of_local_layers(name, installed):
    skip_where_mtp_needs_te(MODELS[name])
    run_ranks(_keys_of_local, 1, name, installed)


def _keys_of_local(rank: int, name: str, installed: bool) -> None:
    sbs.start(1)
    stock = model(False, MODELS[name])
    if installed:
        te.pretend_te()
        of_one_layer = model(False, {}, alike=True)
    assert not te.overlap(transformer_impl="local" if installed else "transformer_engine")
    ours = model(False, MODELS[name])
    assert keys(ours) == keys(stock)
    assert with_state(ours) == set()
    if installed:  # Megatron takes TransformerEngine's for the final norm of such models
        ours = model(False, {}, alike=True)
        assert keys(ours) == keys(of_one_layer)
        assert with_state(ours) == {"decoder.final_layernorm"}


@pytest.mark.parametrize("name", ["RMSNorm, qk", "experts"])
@sbs.on_tp_ranks(1)
def test_both_load_both(rank, name, tmp_path):
    te.pretend_te()
    theirs = model(True, MODELS[name])
    assert te.overlap()
    ours = model(True, MODELS[name])
    with _writers():
        for step, (source, target) in enumerate([(theirs, ours), (ours, theirs)]):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.add_(1)
            place = tmp_path / str(step)
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
