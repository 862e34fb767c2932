"""Only some of a model's linear layers from us: `tp_comm_buffer_name` tells which one is built."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
from flux_megatron.integration.provider import FluxSpecProvider


def provider_of(layers: Collection[str]) -> type[FluxSpecProvider]:
    """A provider whose linears are ours in these layers (of qkv, proj, fc1, fc2), stock in others.

    The projections to queries, keys and values of multi-latent attention are qkv; the projection of
    multi-token prediction is none of them, and stock.
    """
    column = _ours_in(layers, FluxColumnParallelLinear, ColumnParallelLinear)
    row = _ours_in(layers, FluxRowParallelLinear, RowParallelLinear)

    class Provider(FluxSpecProvider):
        def column_parallel_linear(self) -> type:
            return column

        def row_parallel_linear(self) -> type:
            return row

    return Provider


def layer_of(tp_comm_buffer_name: str | None) -> str | None:
    """qkv for Megatron's qkv, q_up_proj, kv_down_proj and so on; other names are themselves."""
    name = tp_comm_buffer_name
    return "qkv" if name is not None and name.startswith(("q", "kv")) else name


def _ours_in(layers: Collection[str], ours: type, stock: type) -> type:
    """A class, because Megatron calls nothing else, whose instances are of one of the two."""

    class Chosen:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            wanted = layer_of(kwargs.get("tp_comm_buffer_name")) in layers
            return (ours if wanted else stock)(*args, **kwargs)

    return Chosen
