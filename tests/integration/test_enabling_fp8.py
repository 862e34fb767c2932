"""FP8 models that others build and hold: TransformerEngine's layers overlap, as without us."""

from __future__ import annotations

from typing import Any

import pytest
import side_by_side as sbs
import te_modules
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from ranks import FUSED
from torch import Tensor

import flux_megatron
from flux_megatron import errors
from flux_megatron.integration import coverage, fp8, install, stand_ins
from flux_megatron.integration.flags import FluxOptions
from flux_megatron.integration.layers import FluxColumnParallelLinear

SIZE, VOCAB = 32, 64


def pretend() -> dict[str, type]:
    """Megatron's wrappers of layers that compute in FP8 on the CPU, by their names."""
    te_modules.install()
    norm_linear = te_modules.sys.modules[f"{te_modules._PACKAGE}.layernorm_linear"].LayerNormLinear
    made = {
        "TEColumnParallelLinear": _wrapper("column", te_modules.Linear),
        "TERowParallelLinear": _wrapper("row", te_modules.Linear),
        "TELayerNormColumnParallelLinear": _wrapper("column", norm_linear),
    }
    transformer_engine.HAVE_TE = True
    for name, kind in made.items():
        kind.__name__ = kind.__qualname__ = name
        setattr(transformer_engine, name, kind)
    return made


def _wrapper(mode: str, base: type[Any]) -> type[Any]:
    class Wrapper(base):
        def __init__(self, inputs: int, outputs: int, *, config: Any, **named: Any) -> None:
            group = named["tp_group"]
            rank, size = group.rank(), group.size()
            shape = (outputs // size, inputs) if mode == "column" else (outputs, inputs // size)
            w = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(rank)).float()
            super().__init__(w, mode, group)
            self.config, self.sequence_parallel = config, config.sequence_parallel and size > 1

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return super().forward(x), None

    return Wrapper


class Model(torch.nn.Module):
    """A layer's MLP and an LM head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mlp = MLP(
            config,
            MLPSubmodules(
                linear_fc1=transformer_engine.TELayerNormColumnParallelLinear,
                linear_fc2=transformer_engine.TERowParallelLinear,
            ),
            tp_group=sbs.parallel_state.get_tensor_model_parallel_group(),
        )
        self.output_layer = ColumnParallelLinear(
            SIZE, VOCAB, config=config, init_method=torch.nn.init.ones_, bias=False,
            skip_weight_param_allocation=False,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.output_layer(self.mlp(x)[0])[0]


def config(**more: Any) -> Any:
    return sbs.settings(
        2, more.pop("sp", True), torch.float32,
        **{"hidden_size": SIZE, "ffn_hidden_size": 2 * SIZE, "add_bias_linear": False,
           "activation_func": torch.nn.functional.relu, "fp8": "hybrid",
           "fp8_recipe": "tensorwise", **more},
    )  # fmt: skip


def step(model: torch.nn.Module, rank: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(rank + 20)
    x = torch.randint(-1, 2, (8, 1, SIZE), generator=made).float().requires_grad_()
    y = model(x)
    y.backward(torch.randint(-1, 2, y.shape, generator=made).float())
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("way", ["--flux-overlap", "enable", "replace"])
@sbs.on_tp_ranks(2, environment={**FUSED, "FLUX_MEGATRON_STRICT": "1"})
def test_fp8_layers_follow_stock(rank, way):
    pretend()
    expected = step(Model(config()), rank)
    if way != "replace":
        if way == "enable":
            flux_megatron.enable()
        else:
            install.install(FluxOptions(), of_te=True)
        model = Model(config())
    else:
        model = Model(config())
        attributes = [[*vars(module)] for module in model.modules()]
        assert str(flux_megatron.replace(model)) == "3 of 3 tensor-parallel linear layers are ours"
    flux_megatron.reset_report()
    sbs.assert_same(step(model, rank), expected)
    assert type(model.mlp.linear_fc1) is transformer_engine.TELayerNormColumnParallelLinear
    assert isinstance(model.output_layer, FluxColumnParallelLinear)
    assert sbs.overlapped() == 6
    flux_megatron.disable()
    flux_megatron.reset_report()
    sbs.assert_same(step(Model(config()), rank), expected)
    assert not flux_megatron.report().total
    if way == "replace":
        assert [[*vars(module)] for module in model.modules()] == attributes
        model.zero_grad()
        step(model, rank)
        assert not flux_megatron.report().total


@sbs.on_tp_ranks(2)
def test_every_layer_that_communicates_asks(rank):
    """With the name of one that TransformerEngine knows to gather, or to scatter, forward."""
    pretend()
    w, group = torch.ones(SIZE, SIZE), torch.distributed.group.WORLD
    given = [("column", None), ("row", "other"), ("row", "proj"), ("column", "qkv")]
    asked = [fp8.asking(te_modules.Linear(w, mode, group), name) for mode, name in given]
    assert [one["ub_name"].rpartition("/")[2] for one in asked] == ["fc1", "fc2", "proj", "qkv"]
    assert not fp8.asking(te_modules.Linear(w, None, group), "qkv"), "a duplicated one"


@sbs.on_tp_ranks(2, environment=FUSED)
def test_chosen_layers_alone_overlap(rank):
    pretend()
    flux_megatron.enable(layers=["fc1"])
    step(Model(config()), rank)
    flux_megatron.disable()
    model = Model(config())
    layers = flux_megatron.replace(model, layers=["fc1"])
    assert (layers.ours, layers.total) == (1, 3)
    step(model, rank)
    assert {p for p, _ in flux_megatron.report().calls} == {"ag_gemm", "gemm_rs"}
    assert flux_megatron.report().total == 4


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8: one of delayed, tensorwise, blockwise"),
        (
            {"fp8_recipe": "blockwise"},
            "it takes the host longer.*; --flux-allow fp8-recipe goes on",
        ),
        ({"tp_comm_overlap": True}, "tp_comm_overlap is True: "),
    ],
)
@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2)
def test_what_te_cannot_overlap_is_refused_by_name(rank, way, changed, why):
    pretend()
    with pytest.raises(ValueError, match=why):
        sbs.with_ours(way, lambda: Model(config(**changed)))
    flux_megatron.disable()


@sbs.on_tp_ranks(2)
def test_what_no_gpu_has_run_goes_on_where_it_is_allowed(rank):
    pretend()
    flux_megatron.enable(allow=["fp8-recipe"])
    Model(config(fp8_recipe="blockwise"))
    flux_megatron.disable()


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_models_without_sequence_parallelism_stay_tes(rank, way):
    """As the vision encoders that Megatron puts beside language models."""
    pretend()
    model = sbs.with_ours(way, lambda: Model(config(sp=False)))
    found = coverage.layers_of([model])
    assert (found.ours, found.total) == (1, 3)
    assert {why for _, why in found.others} == {
        "without sequence parallelism TransformerEngine overlaps nothing"
    }
    flux_megatron.disable()


@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2)
def test_layers_without_a_name_have_16_bits_beside_fp8(rank, way, kind):
    """As adapters and embedders of other modules, of Megatron's own classes."""
    pretend()
    parallel = {"gather_output": False} if kind[0] == "C" else {"input_is_parallel": True}
    built = sbs.with_ours(
        way,
        lambda: torch.nn.ModuleDict({"adapter": getattr(layers, kind)(
            SIZE, SIZE, config=config(), init_method=torch.nn.init.ones_, bias=False,
            skip_bias_add=False, **parallel,
        )}),
    )  # fmt: skip
    assert isinstance(built["adapter"], stand_ins.by_class()[getattr(layers, kind)])
    flux_megatron.disable()


@sbs.on_tp_ranks(2, environment={"FLUX_MEGATRON_STRICT": "1"})
def test_megatron_s_own_layers_have_no_fp8(rank):
    pretend()
    flux_megatron.enable(layers=["fc1"])
    with pytest.raises(ValueError, match="fp8 is 'hybrid': only TransformerEngine's linear"):
        ColumnParallelLinear(
            SIZE, SIZE, config=config(), init_method=torch.nn.init.ones_,
            tp_comm_buffer_name="fc1",
        )  # fmt: skip
    flux_megatron.disable()
    model = Model(config())
    model.mlp.linear_fc2.sequence_parallel = False  # a layer that does not communicate
    with pytest.raises(errors.FallbackRefused, match="2 of 3"):
        flux_megatron.replace(model)
