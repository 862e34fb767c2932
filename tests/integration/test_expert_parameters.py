"""Experts whose parameters nobody copies: trained beside stock's by Megatron's data parallelism and
optimizers, with parameters and gradients where these put them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.models import backends
from megatron.core.transformer.moe import experts as megatron_experts
from ranks import on_cpu_ranks
from test_experts import CASES, EXPERTS, MORE, WITH_BIASES, build, ours
from torch import Tensor
from training_cases import FUSION, OVERLAP, ZERO
from training_run import Feature, Training

import flux_megatron
from flux_megatron.integration import expert_layers, expert_parameters
from flux_megatron.kernels.experts.weights import as_one

SEQUENCE = 8


class GroupedLinear(torch.nn.Module):
    """As TransformerEngine's: parameters weight0 to weightE-1 [N, K], each with its bias behind it
    where they have one, and one GEMM an expert; its `forward` takes the rows of each expert as a
    list.
    """

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any,
        bias: bool, skip_bias_add: bool, is_expert: bool, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert is_expert
        self.num_gemms, self.bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype)
            )
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{expert}", weight)
            if bias:
                own = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
                own.allreduce = weight.allreduce
                self.register_parameter(f"bias{expert}", own)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        weights, biases = (
            [getattr(self, f"{name}{expert}", None) for expert in range(self.num_gemms)]
            for name in ("weight", "bias")
        )
        later = self.bias and self.skip_bias_add
        added = [None] * self.num_gemms if later else biases
        made = map(torch.nn.functional.linear, x.split(m_splits), weights, added)
        return torch.cat([*made]), biases if later else None


def built_of_stand_ins(grouped: type) -> Any:
    """Models have `grouped`, a `TEGroupedMLP`, wherever a specification asks for experts; to be
    entered behind what replaces `SequentialMLP`.
    """
    linears = SimpleNamespace(
        linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None
    )

    class Experts(grouped):  # type: ignore[misc]
        def __init__(self, experts: int, config: Any, submodules: Any, **more: Any) -> None:
            super().__init__(experts, config, linears, **more)

    return mock.patch.object(backends, "SequentialMLP", Experts)


@contextlib.contextmanager
def experts_of(kind: str, is_ours: bool) -> Iterator[None]:
    with ours() if is_ours else sbs.splits_as_lists(), contextlib.ExitStack() as stack:
        if kind == "grouped":
            of_stock = megatron_experts.TEGroupedMLP
            grouped = expert_layers.FluxGroupedExperts if is_ours else of_stock
            stack.enter_context(built_of_stand_ins(grouped))
        yield


def layers(model: Any) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "_parameters_of")]


def lies(model: Any, of: Any) -> list[str]:
    """How the tensors `of` each parameter lie, of each layer and linear."""
    found = []
    for layer in layers(model):
        for name in expert_layers.LINEARS:
            view = as_one([of(one) for one in layer._parameters_of(name)])
            found.append("apart" if view is None else "reverse" if view.reverse else "in order")
    return found


def trained(kind: str, is_ours: bool, feature: Feature) -> tuple[list[float], dict, Any]:
    """Losses, the parameters after the last step, and the model."""
    with experts_of(kind, is_ours):
        training = Training(feature, "stock")
        return training.run(feature.steps), training.weights(), training.modules[0]


@pytest.mark.parametrize(
    ("kind", "case", "ddp", "more", "world_size", "strategy"),
    [
        ("sequential", "two a token", {}, FUSION, 2, "sequential"),
        ("sequential", "swiglu, empty experts", ZERO, FUSION, 2, "fused"),
        ("sequential", "two a token", OVERLAP, FUSION, 4, "sequential"),
        ("grouped", "swiglu, empty experts", {}, {}, 2, "sequential"),
        ("grouped", "two a token", ZERO, FUSION, 2, "sequential"),
        *[("grouped", "as gpt-oss", ZERO, FUSION, 2, "sequential")] * bool(WITH_BIASES),
    ],
)
@on_cpu_ranks("world_size", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_training_copies_nothing(rank, kind, case, ddp, more, strategy):
    assert trained_without_copies(kind, case, ddp, more) == {strategy}


@pytest.mark.parametrize(
    ("kind", "case", "ddp", "more"),
    [
        ("sequential", "swiglu, empty experts", ZERO, FUSION), ("grouped", "two a token", {}, {}),
        ("grouped", "two a token", ZERO, FUSION),
        *[("grouped", "as gpt-oss", ZERO, FUSION)] * bool(WITH_BIASES),
    ],
)  # fmt: skip
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_EXPERTS_ONCE": "1"})
def test_training_copies_nothing_where_a_token_travels_once(rank, kind, case, ddp, more):
    """Rows lie in reverse, as parameters do."""
    assert trained_without_copies(kind, case, ddp, more) == set()


def trained_without_copies(kind: str, case: str, ddp: dict, more: dict) -> set[str]:
    """What ran, and where weights and gradients lie; losses and parameters are stock's."""
    config = EXPERTS | {**CASES, **MORE}[case]
    built = []

    def prepare(model: Any) -> None:
        built[:] = lies(model, lambda one: one.data)
        for layer in layers(model):
            layer.config.gradient_accumulation_fusion = bool(more)

    feature = Feature(
        tp=1, dp=dist.get_world_size(), config=config, ddp=ddp, microbatches=2, steps=2,
        lengths=(SEQUENCE // 2,), prepare=prepare,
    )  # fmt: skip
    right, right_parameters, _ = trained(kind, False, feature)
    flux_megatron.reset_report()
    losses, parameters, model = trained(kind, True, feature)
    torch.testing.assert_close(losses, right, rtol=2e-5, atol=0)
    torch.testing.assert_close(parameters, right_parameters, rtol=2e-4, atol=2e-5)
    report = flux_megatron.report()
    assert not report.copies, report
    # two layers of two linears
    assert built == ["in order"] * 4
    assert lies(model, lambda one: one.data) == (["reverse"] * 4 if ddp else built)
    assert lies(model, lambda one: one.main_grad) == ["reverse"] * 4
    sbs.stop()
    return {ran for _, ran in report.calls}


@on_cpu_ranks(2)
def test_parameters_are_placed_again_and_saved_as_before(rank):
    """A layer that is moved has one storage again, and is loaded and saved as stock's."""
    sbs.start(1, expert_model_parallel_size=2)
    with sbs.splits_as_lists():
        state = build(SEQUENCE, **CASES["two a token"]).state_dict()
    with ours():
        model = build(SEQUENCE, **CASES["two a token"])
    named = dict(model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict({name: value if value is None else value.clone()
                           for name, value in state.items()})  # fmt: skip
    sbs.assert_same({**model.state_dict()}, {**state})
    assert lies(model, lambda one: one.data) == ["in order"] * 4
    assert all(one.data._base is None for one in model.parameters()), "as Megatron's buffers ask"
    sizes = []
    for one in (state, model.state_dict()):
        file = io.BytesIO()
        torch.save(one, file)
        sizes.append(len(file.getvalue()))
    assert abs(sizes[1] - sizes[0]) < 4096, sizes
    model.bfloat16()  # makes a tensor for each
    assert lies(model, lambda one: one.data) == ["in order"] * 4
    assert all(one is named[name] for name, one in model.named_parameters())
    dispatcher = next(m.token_dispatcher for m in model.modules() if hasattr(m, "token_dispatcher"))
    if hasattr(dispatcher, "get_expert_zero_copy_buffers"):  # from 0.19; ours has none in between
        assert dispatcher.get_expert_zero_copy_buffers() == (None, None)
    sbs.stop()


@pytest.mark.parametrize("held", [0, 2])  # the others are frozen
def test_what_a_buffer_holds_stays(held):
    parameters = [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(3)]
    parameters[held].main_grad = torch.zeros(4, 8)
    addresses = [one.data_ptr() for one in parameters]
    expert_parameters.place(parameters)
    assert [one.data_ptr() for one in parameters] == addresses


def test_scattered_main_grads_are_added_to_and_counted():
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2)]
    for one in parameters:
        one.main_grad, one.grad_added_to_main_grad = torch.ones(3, 2), False
    dy, x = torch.ones(5, 3), torch.ones(5, 2)
    received = torch.tensor([[2, 1]], dtype=torch.int32)
    flux_megatron.reset_report()
    with pytest.warns(UserWarning, match="weight gradients of experts are copied: 2 of"):
        dummies = expert_parameters.into_main_grads(parameters, dy, x, received)
    assert [one.main_grad[0, 0].item() for one in parameters] == [3, 2]
    assert all(one.grad_added_to_main_grad for one in parameters)
    assert [one.shape for one in dummies] == [(3, 2)] * 2
    assert [*flux_megatron.report().copies.values()] == [1]


def test_a_weight_without_main_grad_is_named():
    with pytest.raises(RuntimeError, match="a weight of the experts has no main_grad"):
        expert_parameters.into_main_grads([torch.zeros(3, 2)], *[torch.zeros(1)] * 3)


class Adapted(torch.nn.Module):
    """As peft's adapters: it has the weight of the layer that it calls."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.base_layer.weight


@on_cpu_ranks(2)
def test_adapters_around_experts_are_refused(rank):
    """Only the weights would be read, and adapters neither called nor trained."""
    sbs.start(1, expert_model_parallel_size=2)
    with ours():
        model = build(SEQUENCE, **CASES["two a token"])
    expert = layers(model)[0].local_experts[0]
    expert.linear_fc2 = Adapted(expert.linear_fc2)
    with pytest.raises(ValueError, match="Adapted given in place of an experts' linear layer"):
        layers(model)[0]._parameters_of("linear_fc2")
    sbs.stop()


def test_which_gradients_the_experts_add_to_main_grad():
    """Not those of Megatron's FSDP, which hands out its buffers for each call."""

    def fuses(fusion: bool, parameters: list[Any]) -> bool:
        layer = SimpleNamespace(config=SimpleNamespace(gradient_accumulation_fusion=fusion))
        return expert_layers._Experts._fuses_wgrad(layer, parameters)

    plain, other, frozen, sharded = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    sharded.__fsdp_param__ = True
    assert fuses(True, [plain, other])
    assert not fuses(False, [plain, other])
    for one in (frozen, sharded):
        assert not fuses(True, [plain, one])
        assert not fuses(True, [one, plain])
