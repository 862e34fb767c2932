"""LoRA on our layers beside stock ones: adapters made of Megatron's layers, on frozen bases."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from post_training import BOUND, EVEN, learn, log_probs
from ranks import FUSED
from test_packed_training import SP, beside_stock
from test_te_specification import chunks, start
from training_cases import LoRA

import flux_megatron


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


class Wrapped(torch.nn.Module):
    """As Megatron-Bridge wraps TransformerEngine's layer with a norm inside: it asks for the norm's
    output by the layer's class, and takes what is there.
    """

    def __init__(self, to_wrap: Any, gathered: bool) -> None:
        super().__init__()
        self.to_wrap, self.gathers = to_wrap, True
        if isinstance(to_wrap, te.TELayerNormColumnParallelLinear):
            to_wrap.return_layernorm_output = True
            to_wrap.return_layernorm_output_gathered = gathered
            self.gathers = not gathered
        rows, columns = to_wrap.weight.shape
        self.adapter = torch.nn.Linear(columns, rows, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = self.to_wrap(x)
        if isinstance(y, tuple):
            y, x = y
        if self.gathers:
            x = mappings.gather_from_sequence_parallel_region(x)
        return y + self.adapter(x), bias


class Blind(Wrapped):
    """As peft wraps, whose adapters read the layer's input."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer, False)
        self.base_layer = self._modules.pop("to_wrap")


def wrap(model: Any, way: Any, *more: Any) -> Any:
    sbs.seed()
    for layer in model.decoder.layers:
        for parent, name in ((layer.self_attention, "linear_qkv"), (layer.mlp, "linear_fc1")):
            setattr(parent, name, way(getattr(parent, name), *more))
    return model


WAYS = pytest.mark.parametrize(
    "way", ["enable", "enable, a step, adapt", "flag", "replace, adapt", "adapt, replace"]
)


def adapted_as_stock(way: str, adapt: Callable[[Any], Any]) -> Any:
    """A model with our layers whose step is that of a stock one."""
    (stock,) = chunks({}, True)
    expected = sbs.one_step(adapt(stock))
    if way.startswith("enable"):
        flux_megatron.enable(strict=True)
    if way == "flag":
        assert te.overlap()
    (model,) = chunks({}, True)
    if "step" in way:
        sbs.one_step(model)
    if way == "replace, adapt":
        flux_megatron.replace(model)
    model = adapt(model)
    if way == "adapt, replace":
        flux_megatron.replace(model)
    torch.testing.assert_close(sbs.one_step(model), expected, atol=1e-6, rtol=1e-5)
    flux_megatron.disable()
    return model


@pytest.mark.parametrize("gathered", [False, True])
@WAYS
@sbs.on_tp_ranks(2, environment=FUSED)
def test_adapters_read_what_the_linear_layer_behind_a_norm_reads(rank, way, gathered):
    start({})
    # of tests before, in the process that this one was forked from
    torch.nn.modules.module._global_module_registration_hooks.clear()
    importlib.import_module("flux_megatron.integration.adapters").watch.cache_clear()
    model = adapted_as_stock(way, lambda model: wrap(model, Wrapped, gathered))
    assert not model._forward_pre_hooks


@sbs.on_tp_ranks(2, environment={"FLUX_MEGATRON_STRICT": "1"})
def test_layers_within_adapters_are_chosen_by_their_kind(rank):
    start({})
    for way in (Blind, partial(Wrapped, gathered=False)):
        (model,) = chunks({}, True)
        for layer in model.decoder.layers:
            layer.mlp.linear_fc2 = way(layer.mlp.linear_fc2)
        for kind in ("proj", "fc2"):
            assert flux_megatron.replace(model, layers=[kind]).ours == len(model.decoder.layers)
            flux_megatron.disable()


@pytest.mark.parametrize("way", ["enable", "replace"])
@sbs.on_tp_ranks(2, environment=FUSED)
def test_adapters_that_read_rows_before_the_norm_are_refused(rank, way):
    start({})
    (model,) = sbs.with_ours(way, lambda: chunks({}, True))
    with pytest.raises(ValueError, match="Blind: the adapter reads rows before the norm"):
        wrap(model, Blind)
    flux_megatron.disable()
    (model,) = chunks({}, True)
    wrap(model, Blind)
    before = flux_megatron.report().layers
    with pytest.raises(ValueError, match="Blind: the adapter reads rows before the norm"):
        flux_megatron.replace(model)
    assert flux_megatron.report().layers == before
