"""Which of a model's tensor-parallel linear layers are ours, and which are not and why.

Megatron builds some layers by name, whatever its specification has, and others from some
specifications only. So the layers of the built models are counted, not those of a specification.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch.nn import Module

from flux_megatron import errors, settings
from flux_megatron.integration import requirements
from flux_megatron.integration.adapters import ASKED_BY, BLIND
from flux_megatron.integration.expert_layers import OURS
from flux_megatron.integration.layers import (
    FluxColumnParallelLinear,
    FluxRowParallelLinear,
    layer_of,
)
from flux_megatron.integration.replaced import around
from flux_megatron.overlap.report import Layers, note_layers

NOT_CHOSEN = "it is none of the chosen layers"
_OURS = (FluxColumnParallelLinear, FluxRowParallelLinear)
overlapped_otherwise: Callable[[Module], bool] = lambda layer: False  # noqa: E731
_WRAPPERS = re.compile(r"^(module\.)+")
_ADAPTED = re.compile(rf"(\.({ASKED_BY}|{BLIND}))+$")  # the layer within adapters
# names in a model that do not say the kind; Megatron builds the layers of mixers as fc1 and fc2
_KINDS = {"output_layer": "head", "in_proj": "fc1", "out_proj": "fc2"}


def count_layers(training: Any, chosen: tuple[str, ...] | None) -> None:
    """Let `setup_model_and_optimizer` of the module megatron.training.training count the layers of
    the models that it makes, and refuse some under `--flux-strict`.

    It gives the models first. `chosen` are the layers of `--flux-layers`, None for all.
    """

    @around(training, "setup_model_and_optimizer")
    def counting(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        stage = layers_of(result[0], chosen)
        layers = _of_all_stages(stage)
        note_layers(layers, result[0])
        training.print_rank_last(f" flux: {layers}")
        refuse(layers)
        return result


def layers_of(models: Iterable[Module], chosen: tuple[str, ...] | None = None) -> Layers:
    """The tensor-parallel linear layers of these models, which are this rank's chunks of one."""
    ours, others = 0, Counter[tuple[str, str]]()
    for name, layer in linear_layers(models):
        if isinstance(layer, _OURS) or overlapped_otherwise(layer):
            ours += 1
        else:
            others[re.sub(r"\.\d+\.", ".*.", name), _why(name, layer, chosen)] += 1
    return Layers(ours, ours + others.total(), dict(others))


def say(layers: Layers, models: Iterable[Module]) -> None:
    """Refuse some in strict mode; else count them, and log them on rank 0, the same once."""
    refuse(layers)
    note_layers(layers, models)
    requirements.log_once(str(layers))


def refuse(layers: Layers) -> None:
    """`FallbackRefused` in strict mode, where not all chosen layers are ours."""
    others = {name: why for name, why in layers.others if why != NOT_CHOSEN}
    if others and settings.get().strict:
        raise errors.FallbackRefused(f"layers cannot be overlapped: {layers}")


def linear_layers(models: Iterable[Module]) -> Iterator[tuple[str, Module]]:
    for model in models:
        experts = [one for one in model.modules() if isinstance(one, (*OURS.values(),))]
        unused = {one for ours in experts for one in ours.modules() if not isinstance(one, _OURS)}
        for name, module in model.named_modules():
            if module not in unused and _is_tensor_parallel_linear(module):
                yield _WRAPPERS.sub("", name), module


def _is_tensor_parallel_linear(module: Any) -> bool:
    """Experts that leave communication to their token dispatcher are none."""
    if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return not module.explicit_expert_comm
    if hasattr(module, "parallel_mode"):  # TransformerEngine's, which has none in such experts
        return module.parallel_mode in ("column", "row")
    tagged = (
        getattr(parameter, "tensor_model_parallel", False) and parameter.dim() == 2
        for parameter in module.parameters(recurse=False)
    )
    return any(tagged) and not isinstance(module, VocabParallelEmbedding)


def is_chosen(name: str, chosen: tuple[str, ...] | None) -> bool:
    """Whether the layer of this name in its model is one of the `chosen`, None for all."""
    return not chosen or kind_of(name) in chosen


def kind_of(name: str) -> str | None:
    """qkv, proj, fc1, fc2, head or another, by the layer's name in its model."""
    kind = _ADAPTED.sub("", name).rpartition(".")[2].removeprefix("linear_")
    return _KINDS.get(kind) or layer_of(kind)


def _why(name: str, layer: Module, chosen: tuple[str, ...] | None) -> str:
    if not is_chosen(name, chosen):
        return NOT_CHOSEN
    in_fp8 = getattr(getattr(layer, "config", None), "fp8", None) is not None
    if in_fp8 and not getattr(layer, "sequence_parallel", True):
        return "without sequence parallelism TransformerEngine overlaps nothing"
    return f"Megatron built a {type(layer).__module__}.{type(layer).__qualname__}"


def _of_all_stages(stage: Layers) -> Layers:
    """The sum over the pipeline, on all its ranks."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, stage, group=group)
    return functools.reduce(Layers.__add__, stages)
