"""A ready layer specification for megatron-core's `GPTModel`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import StockSpecProvider
from flux_megatron.integration.replaced import put_everywhere


def gpt_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this (virtual) pipeline stage and the final norm.

    For `GPTModel(transformer_layer_spec=)`, of megatron-core's own linears, which
    `building.linears` makes ours. The norm is `FluxNorm`, because megatron-core's does not allow
    sequence parallelism. Process groups must exist.
    """
    with local_spec():
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),  # an argument alone before 0.16
            vp_stage=vp_stage,
        )
    return dataclasses.replace(block, layer_norm=FluxNorm)


@contextlib.contextmanager
def local_spec() -> Iterator[None]:
    """Inside, megatron-core builds its local specifications from our provider.

    Its functions take no provider as an argument, but make one from a global of their module, or
    ask `get_backend`, which makes one from a global of its own.
    """
    with contextlib.ExitStack() as undo:
        put_everywhere("LocalSpecProvider", StockSpecProvider, undo)
        yield
