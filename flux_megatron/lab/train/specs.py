"""A ready layer specification for megatron-core's `GPTModel`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider
from flux_megatron.integration.replaced import put_everywhere

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
    with contextlib.ExitStack() as undo:
        put_everywhere("LocalSpecProvider", PROVIDERS[layers], undo)
        yield
