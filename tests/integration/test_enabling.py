"""Models that others build and hold: `enable`, `replace` and `disable` beside stock."""

from __future__ import annotations

import copy
import gc
import os
import re
import weakref
from unittest import mock

import post_training as post
import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as stock
from post_training import BOUND, VOCAB, build, with_our_norms
from ranks import FUSED, run_ranks
from test_te_specification import chunks, parameters, sharded

import flux_megatron
from flux_megatron import errors, settings
from flux_megatron.integration import install, stand_ins
from flux_megatron.integration.layers import FluxColumnParallelLinear


def life(model: GPTModel) -> list[torch.Tensor]:
    """With weights that come from elsewhere, in other memory and in place."""
    seen = []
    for seed in range(2):
        seen += [post.log_probs(model, (3, 3), seed), *post.learn(model, post.EVEN)]
        for parameter in model.parameters():
            if seed:
                parameter.data.mul_(0.99)
            else:
                parameter.data = parameter.data * 0.99
    return [*seen, *post.learn(model, post.EVEN), *(p.detach() for p in model.parameters())]


def kinds(model: torch.nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_post_training_is_stock_s(rank, sp, way):
    theirs = with_our_norms(sp)
    names = kinds(theirs)
    if way == "enable":
        flux_megatron.enable(strict=True)
        model = build(sp)
    else:
        model = with_our_norms(sp)
        before = {name: id(p) for name, p in model.named_parameters()}
        layers = flux_megatron.replace(model)
        assert (layers.ours, layers.total) == (5, 5)
        assert {name: id(p) for name, p in model.named_parameters()} == before
    assert sbs.ours(model) == sbs.ALL
    # frameworks tell layers apart by these names
    assert {k: v.__name__ for k, v in names.items()} == {
        k: v.__name__ for k, v in kinds(model).items()
    }
    assert parameters(theirs) == parameters(model)  # with their tags
    assert sharded(theirs) == sharded(model)
    # groups cannot be copied, those of stock models neither
    twin = copy.deepcopy(model, {id(g): g for g in dist.distributed_c10d._world.pg_map})
    assert kinds(twin) == kinds(model)
    for copied, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        vars(copied).update(vars(parameter))  # torch's copy has no tags
    flux_megatron.reset_report()
    with post.attention_of_sequences:
        expected, got, again = (life(each) for each in (theirs, model, twin))
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND)
    sbs.overlapped()
    sbs.assert_same(again, got)
    flux_megatron.disable()
    assert kinds(with_our_norms(sp)) == names
    if way == "replace":
        assert kinds(model) == names


TE_NAMES = {"TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"}


@pytest.mark.parametrize("way", ["enable", "replace"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_layers_of_transformer_engine(rank, way, biased):
    options = {"add_bias_linear": biased}
    te.pretend_te()
    (theirs,) = chunks(options, True)
    names = kinds(theirs)
    if way == "enable":
        flux_megatron.enable()
        (model,) = chunks(options, True)
    else:
        (model,) = chunks(options, True)
        before = [id(part) for part in (*model.modules(), *model.parameters())]
        attributes = [[*vars(module)] for module in model.modules()]
        assert str(flux_megatron.replace([model.eval()])).startswith("9 of 9 ")
        assert [id(part) for part in (*model.modules(), *model.parameters())] == before
        assert not any(module.training for module in model.modules())
        model.train()
    assert sbs.ours(model) == sbs.ALL
    found = {type(module).__name__ for module in model.modules()}
    assert found & TE_NAMES == {type(module).__name__ for module in theirs.modules()} & TE_NAMES
    for one, other in ((theirs, model), (model, theirs)):
        one.load_state_dict(other.state_dict())
    assert parameters(theirs) == parameters(model)
    assert sharded(theirs) == sharded(model)
    torch.testing.assert_close(sbs.one_step(theirs), sbs.one_step(model), rtol=0, atol=BOUND)
    layer = model.decoder.layers[0].mlp.linear_fc2
    fresh = copy.copy(layer.weight)
    layer.weight = fresh
    flux_megatron.disable()
    assert layer.weight is fresh, "parameters stay, those that came meanwhile too"
    assert kinds(chunks(options, True)[0]) == names
    if way == "replace":
        assert kinds(model) == names
        assert [[*vars(module)] for module in model.modules()] == attributes
        assert parameters(theirs) == parameters(model)
        sbs.assert_same(sbs.one_step(theirs), sbs.one_step(model))


def test_chosen_layers_and_what_is_said(capfd):
    run_ranks(_chosen, 2)
    said = capfd.readouterr().out.splitlines()
    others = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj"]
    why = "(1): it is none of the chosen layers"
    line = ", ".join(f"decoder.layers.*.{name} {why}" for name in others)
    assert said == [f"flux_megatron: 2 of 5 tensor-parallel linear layers are ours; not {line}"]


def _chosen(rank: int) -> None:
    sbs.start(2)
    before = flux_variables()
    flux_megatron.enable(layers=["qkv", "head"], strict=True, strategy="fused", save_gathered=True)
    assert FluxColumnParallelLinear.save_gathered
    assert settings.get().strict
    model = build(True)
    assert sbs.ours(model) == {"linear_qkv", "output_layer"}
    for _ in range(2):
        sbs.one_step(model)
    assert flux_megatron.report().layers.ours == 2
    flux_megatron.disable()
    assert settings.get() == settings.read(os.environ)
    flux_megatron.enable(layers=["fc2"])
    flux_megatron.enable(layers=["fc1"])
    assert sbs.ours(build(True)) == {"linear_fc1"}
    assert not FluxColumnParallelLinear.save_gathered
    flux_megatron.disable()
    assert flux_variables() == before
    assert sbs.ours(with_our_norms(True)) == set()
    model = with_our_norms(True)
    flux_megatron.replace(model, layers=["qkv", "head"])
    assert sbs.ours(model) == {"linear_qkv", "output_layer"}
    layer = weakref.ref(model.output_layer)
    del model
    gc.collect()
    assert layer() is None  # `disable` keeps no model alive


@sbs.on_tp_ranks(2)
def test_the_report_has_each_model_once(rank):
    flux_megatron.enable(layers=["qkv", "head"])
    built = build(True)
    sbs.one_step(built)
    flux_megatron.disable()
    model = with_our_norms(True)
    for chosen, ours in ((["qkv"], 1), (None, 5)):
        assert flux_megatron.replace(model, layers=chosen).ours == ours
        assert [one.ours for one in flux_megatron.report().models] == [2, ours]
        flux_megatron.disable()
        assert [one.ours for one in flux_megatron.report().models] == [2]
    assert flux_megatron.report().layers.total == 5


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2)
def test_experts_stay(rank, way):
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
    options = post.config(
        False, num_moe_experts=2, add_bias_linear=False, normalization="LayerNorm"
    )
    model = sbs.with_ours(way, lambda: GPTModel(options, spec, VOCAB, 8))
    assert sbs.ours(model) == sbs.ALL - {"linear_fc1", "linear_fc2"}


def flux_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("FLUX_MEGATRON")}


class Foreign(stock.RowParallelLinear):
    """Of a class that is a user's own."""


@sbs.on_tp_ranks(1, environment={"FLUX_MEGATRON_STRICT": "1"})
def test_strict_refuses_layers_that_are_not_ours(rank):
    model = build(False, tensor_model_parallel_size=1)
    model.decoder.layers[0].mlp.linear_fc2.__class__ = Foreign
    names = kinds(model)
    with pytest.raises(errors.FallbackRefused, match=r"4 of 5 .* built a .*Foreign"):
        flux_megatron.replace(model)
    assert kinds(model) == names
    flux_megatron.enable(strict=False)
    assert not settings.get().strict
    flux_megatron.enable()
    model = build(False, tensor_model_parallel_size=1)
    model.decoder.layers[0].mlp.linear_fc2.__class__ = Foreign
    with pytest.raises(errors.FallbackRefused, match=r"4 of 5 .* built a .*Foreign"):
        sbs.one_step(model)
    if hasattr(GPTModel, "build_schedule_plan"):  # in place of a forward of the model
        model = build(False, tensor_model_parallel_size=1)
        model.decoder.layers[0].mlp.linear_fc2.__class__ = Foreign
        with pytest.raises(errors.FallbackRefused, match=r"4 of 5 .* built a .*Foreign"):
            model.build_schedule_plan()


@sbs.on_tp_ranks(1)
def test_a_model_of_the_same_bits_in_each_run_races_nothing(rank):
    for way in ("enable", "replace"):
        os.environ["FLUX_MEGATRON_TUNE"] = "auto"
        settings.reload()
        sbs.with_ours(way, lambda: build(False, tensor_model_parallel_size=1))
        assert settings.get().tune == "auto"
        more = {"tensor_model_parallel_size": 1, "deterministic_mode": True}
        sbs.with_ours(way, lambda more=more: build(False, **more))
        assert settings.get().tune == "off"
        flux_megatron.disable()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layers": "qkv"}, "layers is 'qkv', a list of qkv, proj, fc1, fc2, head expected"),
        ({"layers": ["fc3"]}, r"layers is \['fc3'\], a list of qkv, .* expected"),
        ({"layers": []}, r"layers is \[\], a list of qkv, .* expected"),
        ({"strict": "yes"}, "strict is 'yes', True or False expected"),
        ({"save_gathered": 3}, "save_gathered is 3, True or False expected"),
        ({"strategy": "fast"}, "strategy is 'fast', one of auto, .* expected"),
        ({"allow": "x"}, "allow is 'x', a list of names expected"),
    ],
)
def test_bad_options(options, expected):
    with pytest.raises(ValueError, match=expected):
        flux_megatron.enable(**options)
    assert stock.RowParallelLinear.__init__.__module__ == stock.__name__
    assert not hasattr(stock.RowParallelLinear.__init__, "__wrapped__")


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(1)
def test_what_overlapped_is_said_at_exit(rank, way):
    model = build(False, tensor_model_parallel_size=1)
    install.log_at_exit.cache_clear()
    with mock.patch.object(install.atexit, "register") as register:
        flux_megatron.enable() if way == "enable" else flux_megatron.replace(model)
    assert install._log_calls in [call.args[0] for call in register.mock_calls]
    flux_megatron.disable()


@sbs.on_tp_ranks(1)
def test_models_that_cannot_be_replaced(rank):
    for wrong in ("gpt", ["gpt"], None):
        expected = re.escape(f"replace: model {wrong!r} given, a torch.nn.Module or a list of them")
        with pytest.raises(TypeError, match=expected):
            flux_megatron.replace(wrong)
    model = build(False, tensor_model_parallel_size=1)
    names = kinds(model)
    model.output_layer.weight.main_grad = torch.zeros(1)
    with pytest.raises(ValueError, match="the model before DistributedDataParallel wraps it expec"):
        flux_megatron.replace(model)
    del model.output_layer.weight.main_grad
    model.config.fp8 = "hybrid"
    with pytest.raises(ValueError, match="fp8 is 'hybrid'"):
        flux_megatron.replace(model)
    assert kinds(model) == names


@pytest.mark.parametrize(
    ("model", "given"),
    [(torch.nn.Linear(2, 2), "Linear"), ([], "an empty list"), ([torch.nn.ReLU()] * 2, "ReLU, Re")],
)
def test_a_replacement_of_nothing_is_said(model, given):
    models = flux_megatron.report().models
    said = f"replace: {given}.* given, a model with .* linear layers expected: nothing is replaced"
    with pytest.warns(UserWarning, match=said) as seen:
        assert flux_megatron.replace(model).total == 0
    assert [one.filename for one in seen] == [__file__]
    assert flux_megatron.report().models == models


def test_another_megatron_is_refused_by_name(monkeypatch):
    changed = (("ColumnParallelLinear.forward", "its text is new"), ("train_step", "it is new"))
    monkeypatch.setattr(stand_ins.installed, "changed", lambda: changed)
    refused = r"Megatron's:\n  Col.*forward: its text is new\nFLUX_MEGATRON_ALLOW=Col\S* goes on$"
    for call in (flux_megatron.enable, lambda: flux_megatron.replace(torch.nn.Linear(1, 1))):
        with pytest.raises(ValueError, match=refused):
            call()
    flux_megatron.enable(allow=["ColumnParallelLinear.forward"])
    flux_megatron.disable()
