"""wgrad of a linear layer: the GEMM dw [N, K] = dy^T x, for dy [M, N] and x [M, K].

Layers, the tuner and benchmarks form or accumulate it here; only peers bring kernels of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


def plain_wgrad(w: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """dw itself, in the dtype of dy: what autograd gets where nothing is accumulated."""
    return dy.t() @ x


@dataclass(eq=False)
class IntoMainGrad:
    """A `wgrad` of `nn.functions` that adds the gradient to `main_grad` [N, K], of a dtype in
    `SUPPORTED`. Autograd gets no gradient for the weight. torch.compile knows this one.
    """

    main_grad: Tensor

    def __call__(self, w: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        accumulate_wgrad(self.main_grad, dy, x)
        return None


@dataclass(eq=False)
class Deferred:
    """A `wgrad` of `nn.functions` for a gradient that the caller forms later: `take` gets w and dy,
    in the order of backward, and gives what autograd gets. No x is kept for it, or gathered.
    """

    take: Callable[[Tensor, Tensor], Tensor | None]

    def __call__(self, w: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
        return self.take(w, dy)


def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, *, beta: int = 1) -> None:
    """main_grad = beta * main_grad + dy^T x, summed in fp32; with beta 0 main_grad is not read.

    On GPUs by apex's kernel where it is installed. `RuntimeError` for a dtype not in `SUPPORTED`.
    """
    if main_grad.dtype not in SUPPORTED:
        raise RuntimeError(
            f"gradient_accumulation_fusion: main_grad is {main_grad.dtype}, "
            f"one of {SUPPORTED} expected"
        )
    kernels = _apex_kernels()
    if kernels is None or not main_grad.is_cuda or beta == 0:
        accumulate_wgrad_by_torch(main_grad, dy, x, beta=beta)
    elif main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(x, dy, main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(x, dy, main_grad)


def accumulate_wgrad_by_torch(main_grad: Tensor, dy: Tensor, x: Tensor, *, beta: int = 1) -> None:
    """The same without apex; on GPUs one GEMM of cuBLAS that adds to main_grad, without a copy.

    Torch makes one only where `out` is not the tensor that is added to (addmm_out_cuda_impl in its
    Blas.cpp), and reads transposed operands as they lie.
    """
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x, beta=beta)
    elif main_grad.is_cuda and main_grad.dtype == torch.float32:
        accumulate = torch.ops.aten.addmm.dtype_out
        accumulate(main_grad, dy.t(), x, torch.float32, beta=beta, out=main_grad)
    else:
        wgrad = dy.t().float() @ x.float()
        main_grad.copy_(wgrad if beta == 0 else main_grad + wgrad)


@functools.cache
def _apex_kernels() -> Any:
    """apex's extension, or our `integration.apex_shim`, or None."""
    try:
        import fused_weight_gradient_mlp_cuda
    except ImportError:
        return None
    return fused_weight_gradient_mlp_cuda
