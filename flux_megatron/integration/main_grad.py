"""Megatron's protocol for `gradient_accumulation_fusion`: weight gradients added where they are
computed.

The GEMM dy^T x is added to `weight.main_grad`. What autograd then gets is not a gradient: None,
or, for a weight that carries `grad_added_to_main_grad`, a dummy that only keeps the data-parallel
hooks going. Those hooks ignore the dummy except for a weight with `zero_out_wgrad` (a tied
embedding), to whose main_grad they add it: there it has to be zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as stock
from torch import Tensor

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


def into_main_grad(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor | None]:
    """A `wgrad` for `nn.functions` that adds to the main_grad which the weight has now, at forward.

    A weight that is used twice may have another one by the time of backward.
    """
    main_grad = getattr(weight, "main_grad", None)

    def wgrad(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        return wgrad_into_main_grad(weight, dy, x)

    return wgrad


def wgrad_into_main_grad(weight: Any, dy: Tensor, x: Tensor) -> Tensor | None:
    """weight.main_grad += dy^T x.

    For a parameter of Megatron's FSDP: = dy^T x, in the buffer it hands out. dy [M, N], x [M, K],
    main_grad [N, K]. Returns what autograd is to take for the gradient. `RuntimeError` if there is
    no main_grad of a supported type.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
        accumulate_wgrad(weight.main_grad, dy, x, beta=0)
    elif getattr(weight, "main_grad", None) is None:
        raise RuntimeError(
            "gradient_accumulation_fusion: the weight has no main_grad, one from Megatron's "
            "DistributedDataParallel expected"
        )
    else:
        accumulate_wgrad(weight.main_grad, dy, x)
    return placeholder_gradient(weight, x.dtype)


def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, *, beta: int = 1) -> None:
    """main_grad = beta * main_grad + dy^T x, summed in fp32; with beta 0 main_grad is not read.

    On GPUs by apex's kernel where it is installed.
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


def placeholder_gradient(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """The dummy for autograd of a weight whose gradient is or will be in main_grad; marks it so."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    main_grad = weight.main_grad
    zero = getattr(weight, "zero_out_wgrad", False)
    if stock.HAVE_TE and main_grad.is_cuda:  # one buffer for all layers and microbatches
        return stock.get_dummy_wgrad(list(main_grad.shape), dtype, zero=zero)
    make = torch.zeros if zero else torch.empty
    return make(main_grad.shape, dtype=dtype, device=main_grad.device)


@functools.cache
def _apex_kernels() -> Any:
    """apex's extension, or our `apex_shim`, or None."""
    try:
        import fused_weight_gradient_mlp_cuda
    except ImportError:
        return None
    return fused_weight_gradient_mlp_cuda
