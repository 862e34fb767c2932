"""`flux_megatron.enable()`: models that anybody builds after it have our layers.

No specification is changed, because frameworks bring their own and hold finished ones. Instead the
constructors of megatron-core's classes are: an object of exactly such a class becomes one of ours
before it is initialised. Whoever names the class gets it, wherever the name was kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

from megatron.core.models.common.language_module import language_module
from megatron.core.transformer import torch_norm
from megatron.core.transformer.module import MegatronModule
from torch.nn import Module

from flux_megatron import settings
from flux_megatron.integration import (
    adapters,
    autoload,
    coverage,
    fp8,
    install,
    replacing,
    stand_ins,
)
from flux_megatron.integration.flags import LAYERS, FluxOptions, names_given
from flux_megatron.integration.layers import FluxColumnParallelLinear, is_head
from flux_megatron.integration.norm import NORMS, FluxNorm
from flux_megatron.integration.replaced import around
from flux_megatron.integration.selection import layer_of

_undo = contextlib.ExitStack()


def enable(
    *,
    layers: Collection[str] | None = None,
    strict: bool | None = None,
    strategy: str | None = None,
    save_gathered: bool | None = None,
    allow: Collection[str] | None = None,
) -> None:
    """Let models that are built after this have our linear layers, whatever specifies them.

    For frameworks that build megatron-core's models in Python; scripts of Megatron-LM have
    `--flux-overlap`, whose knobs have the same names. `layers`: of qkv, proj, fc1, fc2 and head,
    all by default. What is not given is left to the FLUX_MEGATRON_* variables. Norms that
    megatron-core takes from torch become ours too, because those refuse sequence parallelism.
    Experts stay as they are, and so do TransformerEngine's layers that compute in FP8: they overlap
    by our operations. Rank 0 says in a model's first forward which of its layers are not
    ours and why; `strict` raises `FallbackRefused` there. Another call replaces the first.

    `ValueError` for a wrong option, and for a megatron-core whose layers differ from all that we
    know, unless `allow` names what differs.
    """
    for name, switch in {"strict": strict, "save_gathered": save_gathered}.items():
        if switch not in (None, True, False):
            raise ValueError(f"{name} is {switch!r}, True or False expected")
    if strategy not in (None, *settings.STRATEGIES):
        expected = f"one of {', '.join(settings.STRATEGIES)} expected"
        raise ValueError(f"strategy is {strategy!r}, {expected}")
    options = FluxOptions(
        layers=names_given("layers", layers, LAYERS),
        strategy=strategy,
        strict=strict,
        save_gathered=save_gathered,
        allow=names_given("allow", allow),
    )
    stand_ins.check_megatron(options.allow)
    autoload.disarm()
    _undo.close()
    with contextlib.ExitStack() as undo:
        _apply(options, undo)
        for stock, ours in stand_ins.by_class().items():
            _become(undo, stock, ours, options.layers)
        _build_norms(undo)
        _say(undo, options.layers)
        _undo.push(undo.pop_all())
    install.log_at_exit()


def disable() -> None:
    """Undo `enable` and `replace`: models that are built after this are megatron-core's own, and
    layers that were replaced are what they were. Models built under `enable` keep our layers, as do
    copies of replaced ones.
    """
    autoload.disarm()
    _undo.close()
    replacing.undo()


def _apply(options: FluxOptions, undo: contextlib.ExitStack) -> None:
    """The settings, until `undo`."""
    undo.callback(settings.reload)
    for name, value in options.environment().items():
        if name in os.environ:
            undo.callback(os.environ.__setitem__, name, os.environ[name])
        else:
            undo.callback(os.environ.pop, name)
        os.environ[name] = value
    undo.callback(
        setattr, FluxColumnParallelLinear, "save_gathered", FluxColumnParallelLinear.save_gathered
    )
    FluxColumnParallelLinear.save_gathered = bool(options.save_gathered)
    settings.reload()


def _become(
    undo: contextlib.ExitStack, stock: type, ours: type, layers: tuple[str, ...] | None
) -> None:
    @around(stock, "__init__", undo)
    def becoming(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        name = _built(kwargs)
        chosen = not layers or name in layers
        if type(self) is not stock or not chosen or kwargs.get("is_expert"):
            original(self, *args, **kwargs)
            return
        autoload.made += 1
        if fp8.keeps(stock, kwargs["config"]):
            fp8.check(kwargs["config"])
            original(self, *args, **kwargs)
            vars(self).update(fp8.asking(self, name))
        else:
            self.__class__ = ours
            if name == "head":  # it has 16 bits beside layers of FP8
                vars(self)["beside"] = fp8.FIELDS
            ours.__init__(self, *args, **kwargs)  # type: ignore[misc]


def _built(kwargs: dict[str, Any]) -> str | None:
    """Which layer a constructor is called for."""
    return "head" if is_head(kwargs) else layer_of(kwargs.get("tp_comm_buffer_name"))


def _build_norms(undo: contextlib.ExitStack) -> None:
    @around(torch_norm.WrappedTorchNorm, "__new__", undo)
    def built(original: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.normalization in NORMS:
            return FluxNorm(config, *args, **kwargs)
        return original(cls, config, *args, **kwargs)


def _say(undo: contextlib.ExitStack, layers: tuple[str, ...] | None) -> None:
    """A model says in its first forward which of its layers are ours: only then the constructors of
    its classes are done, and adapters have wrapped its layers.
    """

    def say(model: Module, _: Any) -> None:
        hooks = model._forward_pre_hooks  # those of a copy have this one too
        for key in [key for key, hook in hooks.items() if hook is say]:
            del hooks[key]
        coverage.say(coverage.layers_of([model], layers), [model])

    @around(MegatronModule, "__init__", undo)
    def saying(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self, language_module.LanguageModule):
            self.register_forward_pre_hook(say)
            adapters.watch(self)
