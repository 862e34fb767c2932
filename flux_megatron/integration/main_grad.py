"""Megatron's protocol for `gradient_accumulation_fusion`: weight gradients added where they are
computed.

The GEMM dy^T x is added to `weight.main_grad`. What autograd then gets is not a gradient: None,
or, for a weight that carries `grad_added_to_main_grad`, a dummy that only keeps the data-parallel
hooks going. Those hooks ignore the dummy except for a weight with `zero_out_wgrad` (a tied
embedding), to whose main_grad they add it: there it has to be zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as stock
from torch import Tensor

from flux_megatron.wgrad import accumulate_wgrad


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
