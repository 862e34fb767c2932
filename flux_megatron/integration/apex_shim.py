"""`gradient_accumulation_fusion` for megatron-core's own layers where apex is not installed.

They call apex's module `fused_weight_gradient_mlp_cuda`, which every supported version looks up in
two ways: tensor_parallel/layers.py once, when it is imported, into two of its globals; and
`drain_embedding_wgrad_compute`, the deferred gradient of the LM head, by an import each time.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from megatron.core.tensor_parallel import layers as stock
from torch import Tensor

from flux_megatron.integration.replaced import put
from flux_megatron.wgrad import accumulate_wgrad_by_torch

NAME = "fused_weight_gradient_mlp_cuda"


def _accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    """main_grad [N, K] += dy^T x for x [..., K], dy [..., N]: as apex's functions are called."""
    accumulate_wgrad_by_torch(main_grad, dy.flatten(0, -2), x.flatten(0, -2))


SHIM: Any = types.ModuleType(NAME, "apex's functions, computed by torch")
SHIM.__spec__ = ModuleSpec(NAME, None)
SHIM.wgrad_gemm_accum_fp32 = SHIM.wgrad_gemm_accum_fp16 = _accumulate


def provide_wgrad_kernels() -> None:
    """Let megatron-core find a module of apex's name, unless apex itself is there. Another call
    changes nothing.
    """
    try:
        import fused_weight_gradient_mlp_cuda as found
    except ImportError:
        found = sys.modules[NAME] = SHIM
    if found is SHIM:
        put(stock, NAME, SHIM)
        put(stock, "_grad_accum_fusion_available", True)
