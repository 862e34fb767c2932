"""Our layer for the LM head of megatron-core's models, which no layer specification names."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import gpt_model

from flux_megatron.integration import stand_ins
from flux_megatron.integration.replaced import put_everywhere


@contextlib.contextmanager
def use_flux_output_layer() -> Iterator[None]:
    """Inside, a new `GPTModel` gets our layer for its LM head, and so do other
    models whose modules have been imported.

    Only the name that those look up is replaced. The class in megatron-core's own layers.py must
    stay: its constructor finds its parent by that name.
    """
    ours = _Overlay(gpt_model.tensor_parallel, ColumnParallelLinear=stand_ins.ColumnParallelLinear)
    with contextlib.ExitStack() as undo:
        put_everywhere("tensor_parallel", ours, undo)
        yield


class _Overlay(types.ModuleType):
    """A module seen through a few replaced names."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
