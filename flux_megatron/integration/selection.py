"""Some of a model's linear layers from us: Megatron names each by its `tp_comm_buffer_name`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

from flux_megatron.integration.provider import FluxSpecProvider, FluxTEProvider, StockSpecProvider

# methods of a provider, and the layers that megatron-core builds of the class each returns
METHODS = {
    "column_parallel_linear": {"qkv", "fc1"},
    "column_parallel_layer_norm_linear": {"qkv", "fc1"},
    "row_parallel_linear": {"proj", "fc2"},
}
STOCK: dict[type, type] = {FluxSpecProvider: StockSpecProvider, FluxTEProvider: TESpecProvider}


def provider_of(layers: Collection[str], provider: type) -> type:
    """`provider` with its linears in these layers (of qkv, proj, fc1, fc2), stock ones in others.

    Stock is what the same specification has without us: Transformer Engine's classes, or
    megatron-core's own. The projections to queries, keys and values of multi-latent attention are
    qkv; the projection of multi-token prediction is none of them, and stock.
    """
    methods = {}
    for method, built in METHODS.items():
        ours, stock = (getattr(each(), method)() for each in (provider, STOCK[provider]))
        replaced = built & {*layers}
        chosen = _ours_in(replaced, ours, stock) if replaced and ours is not stock else stock
        methods[method] = lambda self, chosen=chosen: chosen
    return type("Provider", (provider,), methods)


def replacements_by(provider: type, base: type) -> dict[type, type]:
    """By each class of the specification of `base`, ours or stock, the one that `provider` has."""
    classes = {}
    for method in METHODS:
        stock = getattr(STOCK[base](), method)()
        if isinstance(stock, type):  # local specifications have no norm within a linear layer
            classes[stock] = getattr(provider(), method)()
    return classes


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
