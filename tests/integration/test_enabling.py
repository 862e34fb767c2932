"""Models that others build and hold: `enable`, `replace` and `disable` beside stock."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer import torch_norm
from ranks import FUSED, run_ranks
from test_te_specification import chunks, parameters, sharded

import flux_megatron
from flux_megatron import errors, settings
from flux_megatron.integration import (
    FluxColumnParallelLinear,
    FluxNorm,
    FluxRowParallelLinear,
    stand_ins,
)

BOUND = 1e-5  # of losses and weights in fp32: docs/tests.md
VOCAB, LAYERS = 32, 1
# tokens of the sequences that are packed into one row, in each micro-batch of each step
PACKED = [[(5, 3), (8,)], [(2, 7, 5), (4,)], [(1, 1, 2), (6, 6)]]
SPEC = get_gpt_layer_local_spec(normalization="RMSNorm")  # as a framework holds it


def config(sp: bool, **more: Any) -> Any:
    return sbs.settings(
        2, sp, torch.float32,
        **{"num_layers": LAYERS, "hidden_size": 16, "ffn_hidden_size": 32, "hidden_dropout": 0.0,
           "attention_dropout": 0.0, "normalization": "RMSNorm", **more},
    )  # fmt: skip


def build(sp: bool, **more: Any) -> GPTModel:
    sbs.seed()
    return GPTModel(
        config=config(sp, **more), transformer_layer_spec=SPEC, vocab_size=VOCAB,
        max_sequence_length=64, position_embedding_type="rope",
    )  # fmt: skip


def with_our_norms(sp: bool, **more: Any) -> GPTModel:
    """Stock: its norms refuse sequence parallelism."""
    original = vars(torch_norm.WrappedTorchNorm)["__new__"]
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: FluxNorm(*args, **kwargs)
    try:
        return build(sp, **more)
    finally:
        torch_norm.WrappedTorchNorm.__new__ = original


def packed(lengths: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """One row [1, tokens] of several sequences, each blind to the others; then labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (1, sum(lengths) + 1), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    order = torch.arange(len(number))
    mask = (number[:, None] != number) | (order[:, None] < order)
    return tokens[:, :-1].contiguous(), positions, mask[None, None], tokens[:, 1:].contiguous()


def train(model: GPTModel) -> dict[str, Any]:
    """Steps with what a post-training job does between them."""
    seen: dict[str, Any] = {"losses": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, micro_batches in enumerate(PACKED):
        model.eval()
        with torch.no_grad():  # log-probabilities
            *inputs, labels = packed((3, 3), 100 + step)
            seen["losses"].append(model(*inputs, labels=labels).clone())
        model.train()
        optimizer.zero_grad()
        for number, lengths in enumerate(micro_batches):
            *inputs, labels = packed(lengths, 10 * step + number)
            loss = model(*inputs, labels=labels)
            loss.mean().backward()
            seen["losses"].append(loss.detach())
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        for parameter in model.parameters():  # weights that come from elsewhere
            if step % 2:
                parameter.data.mul_(0.99)
            else:
                parameter.data = parameter.data * 0.99
    return {**seen, "state": {k: v for k, v in model.state_dict().items() if v is not None}}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert [*one["state"]] == [*other["state"]]
    pairs = [*zip(one["losses"], other["losses"], strict=True),
             *((v, other["state"][k]) for k, v in one["state"].items())]  # fmt: skip
    return max(float((a - b).abs().max()) for a, b in pairs)


def kinds(model: torch.nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def ours(model: torch.nn.Module) -> set[str]:
    flux = (FluxColumnParallelLinear, FluxRowParallelLinear)
    return {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, flux)}


ALL = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"}


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
    assert ours(model) == ALL
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
    expected, got = train(theirs), train(model)
    assert apart(expected, got) <= BOUND
    report = flux_megatron.report()
    assert report.overlapped == report.total > 0
    assert apart(got, train(twin)) == 0
    flux_megatron.disable()
    assert kinds(with_our_norms(sp)) == names
    if way == "replace":
        assert kinds(model) == names


TE_NAMES = {"TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"}


@pytest.mark.parametrize("way", ["enable", "replace"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_layers_of_transformer_engine(rank, way, biased):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": biased}
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
    assert ours(model) == ALL
    found = {type(module).__name__ for module in model.modules()}
    assert found & TE_NAMES == {type(module).__name__ for module in theirs.modules()} & TE_NAMES
    for one, other in ((theirs, model), (model, theirs)):
        one.load_state_dict(other.state_dict())
    assert parameters(theirs) == parameters(model)
    assert sharded(theirs) == sharded(model)
    outputs = [_step(each) for each in (theirs, model)]
    assert apart(*outputs) <= BOUND
    flux_megatron.disable()
    assert kinds(chunks(options, True)[0]) == names
    if way == "replace":
        assert kinds(model) == names
        assert [[*vars(module)] for module in model.modules()] == attributes
        assert parameters(theirs) == parameters(model)
        assert apart(*(_step(each) for each in (theirs, model))) == 0


def _step(model: GPTModel) -> dict[str, Any]:
    tokens = torch.arange(8)[None] % 16
    loss = model(tokens, tokens, None, labels=tokens)
    model.zero_grad()
    loss.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"losses": [loss.detach()], "state": gradients}


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
    assert ours(model) == {"linear_qkv", "output_layer"}
    for _ in range(2):
        _step(model)
    assert flux_megatron.report().layers.ours == 2
    flux_megatron.disable()
    assert settings.get() == settings.read(os.environ)
    flux_megatron.enable(layers=["fc2"])
    flux_megatron.enable(layers=["fc1"])
    assert ours(build(True)) == {"linear_fc1"}
    assert not FluxColumnParallelLinear.save_gathered
    flux_megatron.disable()
    assert flux_variables() == before
    assert ours(with_our_norms(True)) == set()
    model = with_our_norms(True)
    flux_megatron.replace(model, layers=["qkv", "head"])
    assert ours(model) == {"linear_qkv", "output_layer"}
    layer = weakref.ref(model.output_layer)
    del model
    gc.collect()
    assert layer() is None  # `disable` keeps no model alive


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2)
def test_experts_stay(rank, way):
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
    options = config(False, num_moe_experts=2, add_bias_linear=False, normalization="LayerNorm")
    if way == "enable":
        flux_megatron.enable()
    model = GPTModel(options, spec, vocab_size=VOCAB, max_sequence_length=8)
    if way == "replace":
        flux_megatron.replace(model)
    assert ours(model) == ALL - {"linear_fc1", "linear_fc2"}


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
        _step(model)


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


def test_models_that_cannot_be_replaced():
    with pytest.raises(ValueError, match=r"model is 'gpt', a torch.nn.Module or a list"):
        flux_megatron.replace("gpt")
    run_ranks(_refused, 1)


def _refused(rank: int) -> None:
    sbs.start(1)
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


def test_another_megatron_is_refused_by_name(monkeypatch):
    changed = (("ColumnParallelLinear.forward", "its text is new"), ("train_step", "it is new"))
    monkeypatch.setattr(stand_ins.installed, "changed", lambda: changed)
    refused = r"Megatron's:\n  ColumnParallelLinear.forward: its text is new; FLUX_.* goes on$"
    for call in (flux_megatron.enable, lambda: flux_megatron.replace(torch.nn.Linear(1, 1))):
        with pytest.raises(ValueError, match=refused):
            call()
    flux_megatron.enable(allow=["ColumnParallelLinear.forward"])
    flux_megatron.disable()
