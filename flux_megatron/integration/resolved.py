"""What `auto` means in a run, by Megatron's arguments: whether other communication shares the GPU
with the linear layers, and whether all micro-batches have as many tokens.

Plans that win beside NCCL's kernels are not those that win alone. Communication of experts
and of contexts is not considered: set FLUX_MEGATRON_BESIDE=1 for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flux_megatron import settings

# Arguments of runs whose micro-batches may differ in tokens.
DIFFERING = "variable_seq_lengths", "sft", "perform_rl_step", "hybrid_context_parallel"
# Megatron's names before and after it validates its arguments; a layout may interleave or not.
INTERLEAVED = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def resolve(args: Any, knobs: Mapping[str, str] = MappingProxyType({})) -> None:
    """Resolve what is `auto` of FLUX_MEGATRON_BESIDE and FLUX_MEGATRON_TUNE by Megatron's parsed
    arguments, for this process. `knobs` come before their variables.
    """
    given = settings.read({**os.environ, **knobs})
    if given.beside == "auto":
        os.environ["FLUX_MEGATRON_BESIDE"] = "1" if overlapped_in(args) else "0"
    if given.tune != "off":
        resolve_config(args)
    deterministic = getattr(args, "deterministic_mode", False)
    if given.tune == "auto" and not deterministic and alike_in(args):
        os.environ["FLUX_MEGATRON_TUNE"] = "met"


def resolve_config(config: Any) -> None:
    """Race nothing in this process from now on, if a model's configuration, or the arguments, are
    for the same bits in each run. `ValueError` where races are asked for.
    """
    if not getattr(config, "deterministic_mode", False) or settings.get().tune == "off":
        return
    if settings.get().tune == "on":
        raise ValueError(
            "FLUX_MEGATRON_TUNE=on given with deterministic_mode, off or auto expected: measured "
            "times choose the order of sums"
        )
    os.environ["FLUX_MEGATRON_TUNE"] = "off"
    settings.reload()


def alike_in(args: Any) -> bool:
    """Whether all micro-batches have as many tokens, as Megatron's own samples of one length."""
    differ = any(getattr(args, name, False) for name in DIFFERING)
    return not differ and getattr(args, "dataloader_type", None) != "external"


def overlapped_in(args: Any) -> bool:
    """Gradients reduced or parameters gathered by several replicas beside the layers, or
    activations sent between interleaved stages of a pipeline.
    """

    def value(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    ranks = value("world_size") or int(os.environ.get("WORLD_SIZE", "1"))  # the parser has none
    pipeline = value("pipeline_model_parallel_size") or 1
    # ranks of one context-parallel group share gradients too
    replicas = ranks // ((value("tensor_model_parallel_size") or 1) * pipeline)
    data = value("overlap_grad_reduce") or value("overlap_param_gather")
    sends = value("overlap_p2p_comm", True) and any(value(name) for name in INTERLEAVED)
    return bool((replicas > 1 and data) or (pipeline > 1 and sends))
