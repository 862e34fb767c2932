"""Our layers under the names of those that they stand for.

Converters of checkpoints and data parallelism tell layers apart by the names of their classes:
Megatron-Bridge knows by them how a weight is divided, Megatron-FSDP from 0.18 on too.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers as stock

from flux_megatron import settings
from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear
from flux_megatron.patching import installed
from flux_megatron.versions.library import warn_of_untested
from flux_megatron.versions.megatron_core import MEGATRON_CORE

RELIED_ON = {
    name
    for path in ("tensor_parallel/layers.py", "extensions/transformer_engine.py")
    for name in installed.RELIED_ON[f"megatron/core/{path}"]
}


class ColumnParallelLinear(FluxColumnParallelLinear):
    """For megatron-core's."""


class RowParallelLinear(FluxRowParallelLinear):
    """For megatron-core's."""


class TEColumnParallelLinear(FluxColumnParallelLinear):
    """For TransformerEngine's, as megatron-core wraps it; so are the next two."""


class TERowParallelLinear(FluxRowParallelLinear):
    pass


class TELayerNormColumnParallelLinear(FluxLayerNormColumnParallelLinear):
    pass


def check_megatron(allow: tuple[str, ...] | None = None) -> None:
    """`ValueError` for layers of megatron-core with another text than in every release that we
    know, unless `allow`, by default FLUX_MEGATRON_ALLOW, names them.
    """
    warn_of_untested(MEGATRON_CORE)
    allowed = allow or settings.get().allow
    refused = {
        name: why for name, why in installed.changed() if name in RELIED_ON and name not in allowed
    }
    if refused:
        lines = "\n".join(f"  {name}: {why}" for name, why in refused.items())
        way_on = f"FLUX_MEGATRON_ALLOW={','.join((*allowed, *refused))} goes on"
        raise ValueError(f"our layers cannot replace Megatron's:\n{lines}\n{way_on}")


def by_class() -> dict[type, type[Any]]:
    """Ours by each class of this megatron-core, without TransformerEngine's where it is not."""
    found: dict[type, type[Any]] = {
        stock.ColumnParallelLinear: ColumnParallelLinear,
        stock.RowParallelLinear: RowParallelLinear,
    }
    if transformer_engine.HAVE_TE:
        for ours in (TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear):
            found[getattr(transformer_engine, ours.__name__)] = ours
    return found
