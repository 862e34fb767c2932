"""FP8 in models that others build or hold: TransformerEngine's layers stay and ask for overlap,
which our operations give them (`te_overlap`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flux_megatron.integration import requirements, seams

FIELDS = ("fp8", "fp8_param")  # what our own layers do not do, and need not beside these
NAMES = ("qkv", "proj", "fc1", "fc2")


def keeps(kind: type, config: Any) -> bool:
    """Whether a layer of this class of Megatron's computes in FP8, as none of ours does."""
    in_fp8 = getattr(config, "fp8", None) is not None
    return in_fp8 and not issubclass(kind, (ColumnParallelLinear, RowParallelLinear))


def check(config: Any) -> None:
    """`ValueError` that lists what such a layer's configuration asks for and we do not overlap.
    Without sequence parallelism, as in vision encoders, it asks for nothing.
    """
    seams.check_config(config, FIELDS)
    if not config.sequence_parallel:
        return
    allowed = requirements.names_allowed(config)
    found = requirements.of_fp8(config, of_te=True)
    refused = [one for one in found if not one.goes_on(allowed)]
    if refused:
        raise ValueError("\n".join([seams.CANNOT, *(f"  {one}" for one in refused)]))


def asking(layer: Any, name: str | None) -> dict[str, Any]:
    """The attributes by which a layer of TransformerEngine's asks for overlap; none where it has no
    communication that could be overlapped.
    """
    if layer.parallel_mode not in ("column", "row") or not layer.sequence_parallel:
        return {}
    from flux_megatron.integration import te_overlap  # TransformerEngine is there

    column = layer.parallel_mode == "column"
    if name not in NAMES:  # as the projections of multi-token prediction
        name = "fc1" if column else "fc2"
    return {
        "ub_name": te_overlap.name_for(name, layer.tp_group),
        "ub_overlap_ag_fprop": column, "ub_overlap_rs_dgrad": column,
        "ub_overlap_rs_fprop": not column, "ub_overlap_ag_dgrad": not column,
    }  # fmt: skip
