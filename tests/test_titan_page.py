"""`flux_titan.py` of docs/pytorch.md, with stand-ins for the modules of torchtitan."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_device_ranks
from torch import Tensor
from torch.utils import checkpoint

import flux_megatron
from flux_megatron.overlap.report import reset_report

PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"
M, K, N = 8, 4, 6  # of the whole problem
PLAIN = {"FLUX_MEGATRON_STRATEGY": "sequential"}
STOCK = {torch.ops.aten.mm.default}  # what stock keeps


def pasted() -> tuple[Any, Any]:
    """The stand-ins that the page has changed: of dist_gemm and of activation_checkpoint."""
    fused = SimpleNamespace()
    kept = SimpleNamespace(_get_default_save_ops=lambda: set(STOCK))
    for name, one in (("distributed", {"activation_checkpoint": kept}),
                      ("models", {}), ("models.common", {"dist_gemm": fused})):  # fmt: skip
        module = sys.modules[f"torchtitan.{name}"] = ModuleType(f"torchtitan.{name}")
        vars(module).update(one)
    sys.modules["torchtitan"] = ModuleType("torchtitan")
    section = PAGE.read_text().split("\n## torchtitan\n")[1].split("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(source, {"__name__": "flux_titan"})
    return fused, kept


def whole(*shape: int, seed: int = 1) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=made).float().to(DEVICE).requires_grad_()


def own(tensor: Tensor, dim: int) -> Tensor:
    return tensor.detach().chunk(2, dim)[dist.get_rank()].clone().requires_grad_()


@on_device_ranks(2, environment=PLAIN)
def test_functions_give_shards_of_the_whole_layer(rank):
    fused, _ = pasted()
    group = dist.group.WORLD
    name = group.group_name
    x, w1, w3, bias = whole(M, K), whole(N, K, seed=2), whole(N, K, seed=3), whole(N, seed=4)
    gate, up = x @ w1.T + bias, x @ w3.T
    dy = whole(M, N, seed=5).detach()
    (gate + 2 * up).backward(dy)
    shards = [own(x, 0), own(w1, 0), own(w3, 0), own(bias, 0)]
    column = fused.AllGatherLinear.apply(shards[0], shards[1], shards[3], group, name)
    pair = fused.AllGatherLinearMulti.apply(*shards[:3], group, name)
    assert_exact(column, own(gate, 1), "column")
    assert_exact(pair[0], own(x @ w1.T, 1), "first of two")
    assert_exact(pair[1], own(up, 1), "second of two")
    (column + 2 * pair[1]).backward(own(dy, 1))
    for shard, tensor in zip(shards, (x, w1, w3, bias), strict=True):
        assert_exact(shard.grad, own(tensor.grad, 0), "gradient of a column layer")

    h, w2 = whole(M, K, seed=6), whole(N, K, seed=7)
    bias.grad = None
    (y := h @ w2.T + bias).backward(dy)
    shards = [own(h, 1), own(w2, 1), bias.detach().clone().requires_grad_()]
    row = fused.LinearReduceScatter.apply(*shards, group, name)
    assert_exact(row, own(y, 0), "row")
    row.backward(own(dy, 0))
    expected = (own(h.grad, 1), own(w2.grad, 1), bias.grad)
    for shard, gradient in zip(shards, expected, strict=True):
        assert_exact(shard.grad, gradient, "gradient of a row layer")


def calls_of(operators: set[Any]) -> int:
    """How many calls forward and backward make where a policy keeps what these operators give."""
    fused, kept = pasted()
    operators = operators or kept._get_default_save_ops()
    save, other = (
        checkpoint.CheckpointPolicy.MUST_SAVE,
        checkpoint.CheckpointPolicy.PREFER_RECOMPUTE,
    )

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(
            lambda _, operator, *__, **___: save if operator in operators else other
        )

    def layer(x: Tensor) -> Tensor:
        group = dist.group.WORLD
        y = fused.AllGatherLinear.apply(x, own(whole(N, K), 0), None, group, group.group_name)
        return y.sin().cos()

    reset_report()
    y = checkpoint.checkpoint(
        layer, own(whole(M, K), 0), use_reentrant=False, context_fn=contexts, early_stop=False
    )
    y.sum().backward()
    return flux_megatron.report().total


@on_device_ranks(2, environment=PLAIN)
def test_selective_checkpointing_keeps_results(rank):
    assert calls_of(STOCK) - calls_of(set()) == 1
