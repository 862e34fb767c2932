"""Which layers of a model are ours: counted in the model that was built, over all its stages."""

from __future__ import annotations

import types

import pytest
import side_by_side as sbs
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from ranks import on_cpu_ranks

import flux_megatron
from flux_megatron import errors
from flux_megatron.integration import building, coverage
from flux_megatron.lab.train.specs import gpt_block_spec
from flux_megatron.overlap.report import Layers

OTHER = "Megatron built a megatron.core.tensor_parallel.layers."


def model(layers: tuple[str, ...] | None = None, head: bool = True, **more) -> GPTModel:
    config = sbs.settings(1, False, torch.float32, **{"num_layers": 2, **more})
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    parts = {"pre_process": pp_rank == 0, "post_process": pp_rank == last}
    spec = gpt_block_spec(config)
    with building.linears(layers):
        built = GPTModel(config, spec, vocab_size=8, max_sequence_length=8, **parts)
    if not head and parts["post_process"]:
        stock = ColumnParallelLinear(
            config.hidden_size, 8, config=config, init_method=config.init_method, bias=False
        )
        built.output_layer = stock
    return built


def counted(*models) -> Layers:
    """As a launch counts them, from what Megatron's set-up gives."""
    printed: list[str] = []
    training = types.SimpleNamespace(
        setup_model_and_optimizer=lambda: (models, "optimizer", "scheduler"),
        print_rank_last=printed.append,
    )
    coverage.count_layers(training, None)
    assert training.setup_model_and_optimizer() == (models, "optimizer", "scheduler")
    now = flux_megatron.report()
    assert printed == [f" flux: {now.layers}"]
    assert str(now.layers) in str(now)
    return now.layers


@sbs.on_tp_ranks(1)
def test_all_are_ours(rank):
    wrapped = torch.nn.Module()
    wrapped.module = model()
    assert counted(wrapped) == Layers(9, 9, {})


COLUMN = "ColumnParallelLinear"


@on_cpu_ranks(2)
def test_stages_of_a_pipeline_are_added_up(rank):
    sbs.start(1, pipeline_model_parallel_size=2)
    stage = model(head=False, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert counted(stage) == Layers(8, 9, {("output_layer", OTHER + COLUMN): 1})


@sbs.on_tp_ranks(1)
def test_layers_of_one_kind_are_reported_once_with_their_number(rank):
    others = {
        ("decoder.layers.*.self_attention.linear_qkv", OTHER + COLUMN): 2,
        ("decoder.layers.*.self_attention.linear_proj", f"{OTHER}RowParallelLinear"): 2,
        ("decoder.layers.*.mlp.linear_fc1", OTHER + COLUMN): 2,
        ("decoder.layers.*.mlp.linear_fc2", f"{OTHER}RowParallelLinear"): 2,
    }
    assert counted(model(("head",))) == Layers(1, 9, others)


@sbs.on_tp_ranks(1, environment={"FLUX_MEGATRON_STRICT": "1"})
def test_strict_refuses_what_is_not_ours_unless_it_was_not_chosen(rank):
    counted(model())
    with pytest.raises(errors.FallbackRefused, match=r"8 of 9 .* are ours; not output_layer \(1\)"):
        counted(model(head=False))
    some = model(("qkv", "fc2"))
    chosen = coverage.layers_of([some], ("qkv", "fc2"))
    assert (chosen.ours, chosen.total) == (4, 9)
    assert {why for _, why in chosen.others} == {coverage.NOT_CHOSEN}
    coverage.refuse(chosen)
    with pytest.raises(errors.FallbackRefused, match="output_layer"):
        coverage.refuse(coverage.layers_of([some], ("qkv", "fc2", "head")))


class Foreign(torch.nn.Module):
    """Of a class that nobody knows, but its weight is sharded."""

    def __init__(self, sharded: bool, mode: str | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.weight.tensor_model_parallel = sharded
        if mode is not None:
            self.parallel_mode = mode or None


@pytest.mark.parametrize(
    ("layer", "is_one"),
    [
        (Foreign(sharded=True), True),
        (Foreign(sharded=False), False),
        (Foreign(sharded=False, mode="row"), True),
        (Foreign(sharded=True, mode=""), False),
    ],
)
def test_layers_of_other_classes(layer, is_one):
    models = [torch.nn.ModuleDict({"module": layer})]
    why = f"Megatron built a {Foreign.__module__}.Foreign"
    assert coverage.layers_of(models) == Layers(0, is_one, {("module", why): 1} if is_one else {})


@sbs.on_tp_ranks(2)
def test_experts_communicate_by_their_dispatcher_and_are_not_counted(rank):
    more = {"num_moe_experts": 2, "add_bias_linear": False, "tensor_model_parallel_size": 2}
    assert counted(model(**more, sequence_parallel=True)) == Layers(5, 5, {})
