"""Our layers under the names of those that they stand for.

Converters of checkpoints and data parallelism tell layers apart by the names of their classes:
Megatron-Bridge knows by them how a weight is divided, Megatron-FSDP from 0.18 on too.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer import utils

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


# up to 0.15 layers need no groups there
_with_groups = getattr(utils, "ensure_metadata_has_dp_cp_group", lambda metadata: metadata)


class _AsTransformerEngine:
    """What Megatron and frameworks read of TransformerEngine's layers, as megatron-core wraps them:
    where latents are cached, by adapters, in checkpoints.
    """

    delays = True

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out_features, self.in_features = self.weight.shape
        self.tp_size, self.use_bias = self.tp_group.size(), self.bias is not None
        self.te_return_bias = self.skip_bias_add and self.use_bias
        self.ub_name = kwargs.get("tp_comm_buffer_name")
        self.is_first_microbatch = self.disable_parameter_transpose_cache = False

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        own: Any = super()
        return own.sharded_state_dict(prefix, sharded_offsets, _with_groups(metadata))


class TEColumnParallelLinear(_AsTransformerEngine, FluxColumnParallelLinear): ...


class TERowParallelLinear(_AsTransformerEngine, FluxRowParallelLinear): ...


class TELayerNormColumnParallelLinear(_AsTransformerEngine, FluxLayerNormColumnParallelLinear): ...


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
