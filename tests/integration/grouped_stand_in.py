"""A stand-in for TransformerEngine's grouped linears as Megatron's `TEGroupedMLP` builds them.

It has their parameters, weight0 to weightE-1 [N, K], and computes one GEMM an expert.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models import backends
from torch import Tensor


class GroupedLinear(torch.nn.Module):
    """`forward` takes the rows of each expert as a list, as TransformerEngine's does."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any,
        bias: bool, is_expert: bool, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert is_expert
        assert not bias
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype)
            )
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        pieces = x.split(m_splits)
        weights = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
        return torch.cat([one @ w.t() for one, w in zip(pieces, weights, strict=True)]), None


def as_only_experts(grouped: type) -> type:
    """`grouped`, a `TEGroupedMLP`, built of stand-ins wherever a specification asks for experts."""

    class Experts(grouped):  # type: ignore[misc]
        def __init__(self, experts: int, config: Any, submodules: Any, **more: Any) -> None:
            linears = SimpleNamespace(
                linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None
            )
            super().__init__(experts, config, linears, **more)

    return Experts


def use(grouped: type) -> Any:
    """Models built in this context have it; to be entered behind what replaces `SequentialMLP`."""
    from unittest import mock

    return mock.patch.object(backends, "SequentialMLP", as_only_experts(grouped))
