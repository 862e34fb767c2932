"""A ready layer specification for megatron-core's `GPTModel`, and a way to its LM head besides."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider

WITH_HEADS = tuple(
    f"megatron.core.models.{name}"
    for name in (
        "gpt.gpt_model", "T5.t5_model", "bert.bert_model", "mamba.mamba_model",
        "hybrid.hybrid_model",
    )
)  # fmt: skip
PROVIDERS = {"flux": FluxSpecProvider, "stock": StockSpecProvider}


def gpt_block_spec(
    config: Any, layers: str = "flux", vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The decoder layers of this (virtual) pipeline stage and the final norm.

    For `GPTModel(transformer_layer_spec=)`. `layers` is "flux", or "stock" for megatron-core's own
    linears; with either the norm is `FluxNorm`, because megatron-core's does not allow sequence
    parallelism. Process groups must exist. `ValueError` for other `layers`.
    """
    with local_spec_from(layers):
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),  # an argument alone before 0.16
            vp_stage=vp_stage,
        )
    return dataclasses.replace(block, layer_norm=FluxNorm)


@contextlib.contextmanager
def local_spec_from(layers: str) -> Iterator[None]:
    """Inside, megatron-core builds its local specifications from our provider.

    Its functions take no provider as an argument, but make one from a global of their module, or
    ask `get_backend`, which makes one from a global of its own.
    """
    if layers not in PROVIDERS:
        raise ValueError(f"layers is {layers!r}, one of {sorted(PROVIDERS)} expected")
    with contextlib.ExitStack() as replaced:
        for module in (backends, gpt_layer_specs):
            if hasattr(module, "LocalSpecProvider"):
                replaced.enter_context(_attribute(module, "LocalSpecProvider", PROVIDERS[layers]))
        yield


@contextlib.contextmanager
def use_flux_output_layer() -> Iterator[None]:
    """Inside, a new `GPTModel` gets a `FluxColumnParallelLinear` for its LM head, and so do other
    models whose modules have been imported.

    Only the name that those look up is replaced. The class in megatron-core's own layers.py must
    stay: its constructor finds its parent by that name.
    """
    ours = _Overlay(gpt_model.tensor_parallel, ColumnParallelLinear=FluxColumnParallelLinear)
    with contextlib.ExitStack() as replaced:
        for name in WITH_HEADS:
            if name in sys.modules:
                replaced.enter_context(_attribute(sys.modules[name], "tensor_parallel", ours))
        yield


class _Overlay(types.ModuleType):
    """A module seen through a few replaced names."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
