"""Models that are built from now on have our layers, whatever specifies them.

No specification is changed, because Megatron and frameworks have many and hold finished ones.
Instead the constructors of megatron-core's classes are: an object of exactly such a class becomes
one of ours before it is initialised. Whoever names the class gets it, wherever the name was kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from megatron.core.transformer import torch_norm

from flux_megatron.integration import adapters, autoload, fp8, local_graphs, resolved, stand_ins
from flux_megatron.integration.layers import is_head, layer_of
from flux_megatron.integration.norm import NORMS, FluxNorm
from flux_megatron.integration.replaced import around

_undo = contextlib.ExitStack()


def stop() -> None:
    """Undo what `until_stopped` has, and wait for no Megatron to begin."""
    autoload.disarm()
    _undo.close()


@contextlib.contextmanager
def until_stopped() -> Iterator[contextlib.ExitStack]:
    """A stack that lasts until the next `stop`, which comes first; an error undoes it at once."""
    stop()
    with contextlib.ExitStack() as undo:
        local_graphs.mend(undo)
        adapters.watch()
        yield undo
        _undo.push(undo.pop_all())


@contextlib.contextmanager
def linears(layers: Collection[str] | None = None, *, experts: bool = False) -> Iterator[None]:
    """Inside, the linear layers of new models are ours, or those of `layers` alone: of qkv, proj,
    fc1, fc2 and head.

    TransformerEngine's layers that compute in FP8 stay its own, and ask for overlap.
    """
    with contextlib.ExitStack() as undo:
        for stock, ours in stand_ins.by_class().items():
            _become(undo, stock, ours, layers, experts)
        yield


def _become(
    undo: contextlib.ExitStack, stock: type, ours: type, layers: Collection[str] | None,
    experts: bool,
) -> None:  # fmt: skip
    @around(stock, "__init__", undo)
    def becoming(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        name = "head" if is_head(kwargs) else layer_of(kwargs.get("tp_comm_buffer_name"))
        chosen = experts if kwargs.get("is_expert") else not layers or name in layers
        if type(self) is not stock or not chosen:
            original(self, *args, **kwargs)
            return
        autoload.made += 1
        resolved.resolve_config(kwargs["config"])
        if fp8.keeps(stock, kwargs["config"]):
            fp8.check(kwargs["config"])
            original(self, *args, **kwargs)
            vars(self).update(fp8.asking(self, name))
        else:
            self.__class__ = ours
            if not kwargs.get("tp_comm_buffer_name"):  # an LM head, an adapter: 16 bits beside FP8
                vars(self)["beside"] = fp8.FIELDS
            ours.__init__(self, *args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def norms() -> Iterator[None]:
    """Inside, the norms that megatron-core takes from torch are ours."""
    with contextlib.ExitStack() as undo:

        @around(torch_norm.WrappedTorchNorm, "__new__", undo)
        def built(original: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
            if config.normalization in NORMS:
                return FluxNorm(config, *args, **kwargs)
            return original(cls, config, *args, **kwargs)

        yield
