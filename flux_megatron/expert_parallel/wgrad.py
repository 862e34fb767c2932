"""dw of the experts' GEMMs, of rows that are counted on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flux_megatron.kernels import launch
from flux_megatron.kernels.expert_wgrad import expert_wgrad
from flux_megatron.versions.torch import has_grouped_mm


def weight_gradient(a: Tensor, b: Tensor, received: Tensor) -> Tensor:
    """dw [E, M, N], of each expert a^T b over its rows of a [rows, M] and b [rows, N].

    `received` int32 [R, E] counts its rows. On a GPU the host does not read it; on CPU that costs
    nothing, and a library GEMM an expert is faster than an interpreted kernel.
    """
    dtype = str(a.dtype).removeprefix("torch.")
    if a.device.type != "cpu" and launch.supports_tensors(dtype, a.device.type) is None:
        ends = received.sum(0).cumsum(0).to(torch.int32)
        if _library_groups(a, b):
            return functional.grouped_mm(a.t(), b, offs=ends)
        return expert_wgrad(a, b, ends)
    sizes = received.sum(0).tolist()
    rows = zip(a[: sum(sizes)].split(sizes), b[: sum(sizes)].split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in rows])


def _library_groups(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these rows without a look at `ends` by the host: bf16 on
    Hopper, in whole 16-byte units.
    """
    return (
        has_grouped_mm()
        and a.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(a.device)[0] == 9
        and a.shape[1] % 8 == b.shape[1] % 8 == 0
        and launch.has_whole_units(a, b)
    )
