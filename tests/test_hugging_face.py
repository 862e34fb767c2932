"""Our layers behind the plans of Hugging Face's transformers, beside its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_device_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flux_megatron
from flux_megatron.nn import hugging_face, in_transformers

INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Stock:
    """What transformers' styles do: shard a parameter, then another forward, which counts here."""

    dim = 0

    def shard_param(self, module: nn.Module, name: str, mesh: Any) -> None:
        whole = module._parameters[name]
        placements = [Shard(self.dim)]
        sharded = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        module._parameters[name] = nn.Parameter(sharded)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        module.forward = lambda x: "theirs"
        return module


class StockRowwise(Stock):
    dim = 1


class Styles(dict):
    def register(self, name: str, style: Any) -> None:
        self[name] = style


def transformers(**styles: Any) -> Any:
    """In place of the module that has the styles."""
    module: Any = ModuleType(hugging_face.STYLES)
    module.ALL_PARALLEL_STYLES = Styles(styles)
    return mock.patch.dict(sys.modules, {hugging_face.STYLES: module})


def loaded(layer: nn.Linear, style: str, mesh: Any) -> nn.Module:
    """A layer as transformers loads it by a plan."""
    style = sys.modules[hugging_face.STYLES].ALL_PARALLEL_STYLES[style]
    style.shard_param(layer, "weight", mesh)
    return style.install_forward(layer, mesh)


def linear(N: int, K: int) -> nn.Linear:
    layer = nn.Linear(K, N, bias=False)
    layer.weight.data = torch.arange(1.0 * N * K).view(N, K) % 5 - 2
    return layer


@on_device_ranks(2)
def test_layers_of_a_plan_overlap_and_others_stay(rank):
    mesh = init_device_mesh(DEVICE, (2,))
    with transformers(colwise=Stock(), rowwise=StockRowwise()):
        in_transformers()
        up, down = linear(12, 8), linear(8, 12)
        x = (torch.arange(4.0 * 8).view(4, 8) % 3).requires_grad_()
        expected = down(up(x).relu())
        expected.sum().backward()
        weight, dx = up.weight.grad.chunk(2)[rank], x.grad.clone()
        x.grad = None
        up, down = loaded(up, "colwise", mesh), loaded(down, "rowwise", mesh)
        up.to(DEVICE), down.to(DEVICE)
        y = down(up(x.to(DEVICE)).relu())
        y.sum().backward()
        assert_exact(y, expected)
        assert_exact(x.grad, dx)
        grad: Any = up.weight.grad
        assert isinstance(grad, DTensor)
        assert_exact(grad.to_local(), weight)
        assert flux_megatron.report().total == 2
        hugging_face._say.cache_clear()
        with pytest.warns(UserWarning, match="own: FluxColwise.*out_features 7 given, a multiple"):
            assert loaded(linear(7, 8), "colwise", mesh)(x) == "theirs"
        dist.barrier()


@pytest.mark.parametrize(
    ("styles", "said"),
    [({}, "'colwise'"), ({"colwise": 1, "rowwise": 1}, "its styles have no install_forward")],
)
def test_a_transformers_with_other_styles_is_refused(styles, said):
    with transformers(**styles), pytest.raises(RuntimeError, match=f"5.24 expected: {said}"):
        in_transformers()


def trained(rank: int, folder: Path, ours: bool) -> tuple[list[float], list[Tensor], int]:
    """Losses and tokens of a model that is loaded by its plan; how many calls overlapped."""
    from transformers import AutoModelForCausalLM

    if ours:
        in_transformers()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_map=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    tokens, losses = torch.arange(2 * 16).view(2, 16) % 7, []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        made = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False)
    return losses, made.tolist(), flux_megatron.report().overlapped


@INSTALLED
def test_a_model_trains_and_generates_as_with_its_own_layers(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    stock, ours = (run_ranks(trained, 2, tmp_path, mine)[0] for mine in (False, True))
    assert ours[0] == pytest.approx(stock[0], abs=2e-6)
    assert ours[1] == stock[1]
    assert (stock[2], ours[2]) == (0, 3 * 14 + 4 * 4)
