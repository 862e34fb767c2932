"""dw of the experts' GEMMs, of rows that are counted on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.experts.wgrad import add_gradients, expert_wgrad


def weight_gradient(a: Tensor, b: Tensor, received: Tensor) -> Tensor:
    """dw [E, M, N], of each expert a^T b over its rows of a [rows, M] and b [rows, N].

    `received` int32 [R, E] counts its rows. On a GPU the host does not read it; on CPU that costs
    nothing, and a library GEMM an expert is faster than an interpreted kernel.
    """
    if _by_kernel(a):
        if _library_groups(a, b):
            return functional.grouped_mm(a.t(), b, offs=ends(received))
        return expert_wgrad(a, b, ends(received))
    return torch.stack([left.t() @ right for left, right in _rows(a, b, received)])


def add_weight_gradient(into: ExpertWeights, a: Tensor, b: Tensor, received: Tensor) -> None:
    """into += dw, which is formed as in `weight_gradient`; `into` [E, M, N] may be fp32.

    The portable kernel adds its sums itself. On Hopper the library's GEMM makes dw first, and one
    launch adds it for all experts.
    """
    if not _by_kernel(a):
        dtype = into.matrices.dtype
        for expert, (left, right) in enumerate(_rows(a, b, received)):
            into.of(expert).addmm_(left.t().to(dtype), right.to(dtype))
    elif _library_groups(a, b):
        add_gradients(into, weight_gradient(a, b, received))
    else:
        expert_wgrad(a, b, ends(received), into)


def _by_kernel(a: Tensor) -> bool:
    return a.device.type != "cpu" and launch.supports_tensors(a.dtype, a.device.type) is None


def ends(received: Tensor) -> Tensor:
    """Where the rows of each expert end, which `received` int32 [R, E] counts: int32 [E]."""
    return received.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _rows(a: Tensor, b: Tensor, received: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each expert's rows of a and b."""
    sizes = received.sum(0).tolist()
    return zip(a[: sum(sizes)].split(sizes), b[: sum(sizes)].split(sizes), strict=True)


def _library_groups(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these rows without a look at `ends` by the host: bf16 on
    Hopper, in whole 16-byte units.
    """
    return (
        a.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(a.device)[0] == 9
        and a.shape[1] % 8 == b.shape[1] % 8 == 0
        and launch.has_whole_units(a, b)
    )
