"""Hugging Face's `from_pretrained(..., tp_plan=...)` with our layers.

A plan of transformers names a parallel style for each layer. One object a name shards parameters
before they are loaded, then gives the layer another forward. Ours stand behind "colwise" and
"rowwise" and change the forward alone, so plans, loading and saving stay.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flux_megatron.nn.parallel_styles import FluxColwiseParallel, FluxRowwiseParallel

STYLES = "transformers.distributed.tensor_parallel"


def in_transformers() -> None:
    """Models that are loaded by a plan from now on have our layers where it says "colwise" or
    "rowwise": backward of the first and forward of the second are GEMM+AR.

    Layers that are no `torch.nn.Linear`, as quantized ones, and those whose size the ranks do not
    divide stay transformers'; a warning says it once for each reason. `RuntimeError` for a
    transformers whose styles are others; those of 5.24 are known.
    """
    try:
        known = importlib.import_module(STYLES).ALL_PARALLEL_STYLES
        theirs = {name: type(known[name]) for name in ("colwise", "rowwise")}
        if not all(hasattr(one, "install_forward") for one in theirs.values()):
            raise AttributeError("its styles have no install_forward")
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            f"a transformers whose tensor-parallel styles are those of 5.24 expected: {error}"
        ) from error
    known.register("colwise", _overlapped(theirs["colwise"], FluxColwiseParallel()))
    known.register("rowwise", _overlapped(theirs["rowwise"], FluxRowwiseParallel()))


def _overlapped(theirs: type, ours: FluxColwiseParallel | FluxRowwiseParallel) -> Any:
    """A style of theirs, in its default layouts as plans mean it, with our forward."""

    class Overlapped(theirs):
        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
            if reason := ours.why_not(module, mesh):
                _say(reason)
                return super().install_forward(module, mesh)
            return ours.adopt(module, mesh)

    return Overlapped()


@cache
def _say(reason: str) -> None:
    warnings.warn(f"flux_megatron: a layer stays transformers' own: {reason}", stacklevel=2)
