"""`flux_megatron.enable()`: models that anybody builds after it have our layers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch.nn import Module

from flux_megatron import settings
from flux_megatron.integration import building, coverage, install, replacing, stand_ins
from flux_megatron.integration import experts as moe
from flux_megatron.integration.flags import LAYERS, FluxOptions, names_given
from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.replaced import around


def enable(
    *,
    layers: Collection[str] | None = None,
    strict: bool | None = None,
    strategy: str | None = None,
    save_gathered: bool | None = None,
    experts: bool | None = None,
    allow: Collection[str] | None = None,
) -> None:
    """Let models that are built after this have our linear layers, whatever specifies them.

    For frameworks that build megatron-core's models in Python; scripts of Megatron-LM have
    `--flux-overlap`, whose knobs have the same names. `layers`: of qkv, proj, fc1, fc2 and head,
    all by default. What is not given is left to the FLUX_MEGATRON_* variables. Norms that
    megatron-core takes from torch become ours too, because those refuse sequence parallelism.
    With `experts` those of Megatron are too, as by `--flux-experts`; a model they cannot run raises
    `ValueError` when it is built. TransformerEngine's layers that compute in FP8 stay, and overlap
    by our operations. Rank 0 says in a model's first forward which of its layers are not
    ours and why; `strict` raises `FallbackRefused` there. Another call replaces the first.

    `ValueError` for a wrong option, and for a megatron-core whose layers differ from all that we
    know, unless `allow` names what differs.
    """
    switches = {"strict": strict, "save_gathered": save_gathered, "experts": experts}
    for name, switch in switches.items():
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
        experts=experts,
        allow=names_given("allow", allow),
    )
    stand_ins.check_megatron(options.allow)
    with building.until_stopped() as undo:
        _apply(options, undo)
        undo.enter_context(building.linears(options.layers))
        undo.enter_context(building.norms())
        if settings.get().experts:
            moe.use(undo)
        _say(undo, options.layers)
    install.log_at_exit()


def disable() -> None:
    """Undo `enable` and `replace`: models that are built after this are megatron-core's own, and
    layers that were replaced are what they were. Models built under `enable` keep our layers, as do
    copies of replaced ones.
    """
    building.stop()
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

    if not hasattr(GPTModel, "build_schedule_plan"):
        return

    @around(GPTModel, "build_schedule_plan", undo)
    def planned(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if say in self._forward_pre_hooks.values():  # such a model is never called
            say(self, None)
        return original(self, *args, **kwargs)
