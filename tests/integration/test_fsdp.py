"""Megatron-FSDP's view of our layers is that of the classes in whose place they stand."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest
import side_by_side as sbs
import torch
from side_by_side import Case

from flux_megatron.integration import fsdp, install
from flux_megatron.integration.flags import FluxOptions
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear


def views(layer, adapter: type) -> dict[str, str | None]:
    detect = vars(adapter)[fsdp.DETECT]
    return {name: detect(adapter, name, layer) for name, _ in layer.named_parameters()}


def adapters() -> list[type]:
    """Those of this Megatron that go by names, and one that does."""

    class GoesByNames:
        def _detect_parallelism_type(self, param_name, module):
            kind = type(module).__name__
            if kind == "TELayerNormColumnParallelLinear" and not param_name.startswith(
                "layer_norm"
            ):
                return "column"
            row = "replicated" if param_name == "bias" else "row"
            by_name = {"ColumnParallelLinear": "column", "RowParallelLinear": row}
            return by_name.get(kind) or ("replicated" if "Norm" in kind else None)

    module = importlib.import_module(fsdp.ADAPTER)
    found = [k for k in vars(module).values() if isinstance(k, type) and fsdp.DETECT in vars(k)]
    for kind in found:  # a launch in this process, of a test before, has told them
        setattr(kind, fsdp.DETECT, inspect.unwrap(vars(kind)[fsdp.DETECT]))
    module.GoesByNames = GoesByNames
    return [GoesByNames, *found]


@pytest.mark.parametrize("kind", ["column", "row", "norm and column"])
@sbs.on_tp_ranks(2)
def test_parameters_are_those_of_the_replaced_class(rank, kind):
    config = sbs.settings(2, True, torch.float32)
    layer, theirs = _built(kind, config)
    kinds = adapters()
    wrong = [views(layer, adapter) for adapter in kinds]
    for _ in range(2):
        install.install(FluxOptions())
    for adapter, before in zip(kinds, wrong, strict=True):
        assert views(layer, adapter) == views(theirs, adapter) != before
        other = types.SimpleNamespace()
        assert vars(adapter)[fsdp.DETECT](adapter, "weight", other) is None


def _built(kind: str, config):
    """Our layer, and one of the class in whose place it stands."""
    if kind != "norm and column":
        return sbs.build(Case(kind), True, config), sbs.build(Case(kind), False, config)
    layer, named = (
        FluxLayerNormColumnParallelLinear(
            8, 8, config=config, init_method=torch.nn.init.xavier_normal_, bias=True,
            gather_output=False, skip_bias_add=False, is_expert=False,
        )
        for _ in range(2)
    )  # fmt: skip
    named.__class__ = type("TELayerNormColumnParallelLinear", (torch.nn.Module,), {})
    return layer, named
