"""`flux_megatron.replace(model)`: the linear layers of a model that stands become ours.

Each stays the object it is, with its parameters, hooks and place in the model: its class changes.
TransformerEngine's layers lack attributes that megatron-core's have; a layer of ours that is made
for it lends them.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch.nn import Module

from flux_megatron.integration import adapters, coverage, fp8, install, resolved, seams, stand_ins
from flux_megatron.integration.flags import LAYERS, names_given
from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.overlap.report import Layers, forget_layers

_MISSING = object()
# what a layer was: its class, and those of its attributes that changed
_before: weakref.WeakKeyDictionary[Module, tuple[type, dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
_models: weakref.WeakSet[Module] = weakref.WeakSet()  # that have replaced layers


def replace(model: Module | Iterable[Module], *, layers: Collection[str] | None = None) -> Layers:
    """Make the tensor-parallel linear layers of a model, or of a list of its chunks, ours.

    Before data parallelism wraps it, in training or evaluation. Layers of TransformerEngine that
    compute in FP8 stay its own and overlap by our operations. Parameters stay the same objects;
    names, state dicts and sharded state dicts stay too, as do experts and norms. `layers`: of qkv,
    proj, fc1, fc2 and head, all by default. The result says which layers are ours and which are
    not and why; rank 0 logs it.

    `TypeError` for what is no model; `ValueError` for a model in data parallelism, for a
    configuration that our layers cannot do and for a megatron-core that we do not know;
    `FallbackRefused` in strict mode where a layer is not ours. The model is unchanged then. A
    warning where there is no such layer, as in a pipeline stage of an embedding alone.
    """
    models = [model] if isinstance(model, Module) else model
    if not isinstance(models, (list, tuple)) or not all(isinstance(m, Module) for m in models):
        expected = "a torch.nn.Module or a list of them expected"
        raise TypeError(f"replace: model {model!r} given, {expected}")
    chosen = names_given("layers", layers, LAYERS)
    stand_ins.check_megatron()
    classes = stand_ins.by_class()
    found = [
        (layer, coverage.kind_of(name), classes[type(layer)])
        for name, layer in coverage.linear_layers(models)
        if type(layer) in classes and coverage.is_chosen(name, chosen)
    ]
    for layer, kind, _ in found:
        _check(layer, kind)
    try:
        for layer, kind, ours in found:
            _become(layer, kind, ours)
        adapters.watch()
        for each in models:
            adapters.ask(each)
        result = coverage.layers_of(models, chosen)
        if not result.total:
            _say_that_it_is_empty(models)
            return result
        coverage.say(result, models)
        _models.update(models)
    except BaseException:
        undo(layer for layer, *_ in found)
        raise
    install.log_at_exit()
    return result


def _say_that_it_is_empty(models: Collection[Module]) -> None:
    given = ", ".join(type(one).__name__ for one in models) or "an empty list"
    expected = "a model with tensor-parallel linear layers expected: nothing is replaced"
    warnings.warn(f"flux_megatron: replace: {given} given, {expected}", stacklevel=3)


def undo(layers: Iterable[Module] | None = None) -> None:
    """Let these layers, by default all, be what they were."""
    if layers is None:
        forget_layers(_models)
        _models.clear()
    for layer in list(_before if layers is None else layers):
        if layer not in _before:
            continue
        layer.__class__, attributes = _before.pop(layer)
        now = vars(layer)
        parameters = now["_parameters"]
        for name, value in attributes.items():
            if value is _MISSING:
                del now[name]
            else:
                now[name] = value
        now["_parameters"].update({n: p for n, p in parameters.items() if p is not None})


def _check(layer: Any, kind: str | None) -> None:
    resolved.resolve_config(layer.config)
    if fp8.keeps(type(layer), layer.config):
        fp8.check(layer.config)
    else:  # an LM head, an adapter: 16 bits beside layers of FP8
        seams.check_config(layer.config, () if kind in fp8.NAMES else fp8.FIELDS)
    if any(hasattr(parameter, "main_grad") for parameter in layer.parameters(recurse=False)):
        raise ValueError(
            "replace() was given a model with the gradient buffers of data parallelism, "
            "the model before DistributedDataParallel wraps it expected"
        )


def _become(layer: Any, kind: str | None, ours: type) -> None:
    if fp8.keeps(type(layer), layer.config):
        ours, changed = type(layer), fp8.asking(layer, kind)
    else:
        changed = {} if issubclass(ours, type(layer)) else _lent(layer, ours)
    now = vars(layer)
    _before[layer] = type(layer), {name: now.get(name, _MISSING) for name in changed}
    layer.__class__ = ours
    now.update(changed)


def _lent(layer: Any, ours: type[Any]) -> dict[str, Any]:
    """The attributes that a layer of TransformerEngine's needs to be one of `ours`."""
    config = copy.copy(layer.config)
    config.perform_initialization = False
    group: Any = getattr(layer, "_tp_group", None) or layer.tp_group
    (rows, columns), size = layer.weight.shape, group.size()
    column = issubclass(ours, FluxColumnParallelLinear)
    made = ours(
        *((columns, rows * size) if column else (columns * size, rows)),
        config=config, init_method=None, bias=layer._parameters.get("bias") is not None,
        skip_bias_add=layer.te_return_bias, is_expert=False, tp_group=group,
        **({"gather_output": False} if column else {"input_is_parallel": True}),
    )  # fmt: skip
    lent = {name: value for name, value in vars(made).items() if not name.startswith("_")}
    parameters = {name: layer._parameters.get(name) for name in made._parameters}
    # TransformerEngine's layers without a bias have an empty one, which is no parameter
    lent |= {name: None for name, value in parameters.items() if value is None}
    kept = {"config": layer.config, "training": layer.training}
    return {**lent, **kept, "_parameters": parameters}
