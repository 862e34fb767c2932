"""LoRA on our layers beside stock ones: adapters made of Megatron's layers, on frozen bases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from ranks import FUSED
from test_enabling import BOUND
from test_packed_training import EVEN, SP, beside_stock, learn, log_probs
from training_cases import LoRA


class BridgeLoRA(torch.nn.Module):
    """As Megatron-Bridge adapts: both halves are parallel and know no sequence parallelism; between
    them, and behind a row layer's, all ranks have all columns.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear, self.config = linear, copy.copy(linear.config)
        self.sp, self.config.sequence_parallel = self.config.sequence_parallel, False
        self.is_column = isinstance(linear, ColumnParallelLinear)
        options = {"config": self.config, "bias": False, "skip_bias_add": False}
        options["init_method"] = torch.nn.init.xavier_normal_
        if self.is_column:
            self.down = ColumnParallelLinear(linear.input_size, 4, gather_output=True, **options)
        else:
            self.down = RowParallelLinear(linear.input_size, 4, input_is_parallel=True, **options)
        whole = not self.is_column
        self.up = ColumnParallelLinear(4, linear.output_size, gather_output=whole, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = self.linear(x)
        if self.sp and self.is_column:
            x = mappings.gather_from_sequence_parallel_region(x)
        more = self.up(self.down(x)[0])[0]
        if self.sp and not self.is_column:
            more = mappings.scatter_to_sequence_parallel_region(more)
        return y + more, bias


def delta(adapter: Any) -> torch.Tensor:
    """What merging adds to the weight of this rank."""
    up, down = adapter.up.weight.data, adapter.down.weight.data
    if isinstance(adapter, BridgeLoRA):
        split = down if adapter.is_column else up
        parts = [torch.empty_like(split) for _ in range(2)]
        dist.all_gather(parts, split)
        up, down = (up, torch.cat(parts)) if adapter.is_column else (torch.cat(parts), down)
    return up @ down


@SP
@pytest.mark.parametrize("way", [BridgeLoRA, LoRA], ids=["bridge", "peft"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_adapters_on_frozen_bases_merged_and_unmerged(rank, way, sp):
    def life(make: Any) -> list[torch.Tensor]:
        model = make().requires_grad_(False)
        sbs.seed()
        layer = model.decoder.layers[0]
        parents = (layer.self_attention, layer.mlp)
        places = [(p, n) for p in parents for n, _ in p.named_children() if n[:7] == "linear_"]
        adapters = [way(getattr(*place)) for place in places]

        def put(each: Callable[[Any], Any]) -> None:
            for (parent, name), adapter in zip(places, adapters, strict=True):
                setattr(parent, name, each(adapter))

        put(lambda adapter: adapter)
        seen = learn(model, EVEN[:3])
        unmerged = log_probs(model, (7, 3), 5)
        for adapter in adapters:
            adapter.linear.weight.data = adapter.linear.weight.data + delta(adapter)
        put(lambda adapter: adapter.linear)
        merged = log_probs(model, (7, 3), 5)
        torch.testing.assert_close(merged, unmerged, rtol=0, atol=BOUND)
        for adapter in adapters:
            adapter.linear.weight.data.sub_(delta(adapter))
        put(lambda adapter: adapter)
        return [*seen, unmerged, merged, *learn(model, EVEN[2:])]

    beside_stock(sp, life)
