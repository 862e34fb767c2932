"""Norms for sequence parallelism, which megatron-core's torch norm refuses.

Each rank normalises its own shard of the sequence, so the gradients of a norm's parameters are
partial sums. Megatron adds them over the tensor-parallel group for every parameter tagged
`sequence_parallel`: the tag is all that a norm has to bring. Flags that only choose a faster kernel
(persist_layer_norm, memory_efficient_layer_norm) are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flux_megatron.nn import norm as functions


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """By LayerNorm, which has a bias, or RMSNorm, which has none."""
    if bias is None:
        return functions.rms_norm(x, weight, eps=eps, zero_centered=zero_centered)
    return functions.layer_norm(x, weight, bias, eps=eps, zero_centered=zero_centered)


class _Norm(torch.nn.Module):
    """Whatever the dtype of its input, the result has the parameters'."""

    returns_residual = False  # read by newer versions of Megatron

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = self._parameter(config, hidden_size, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        return normalised(x, self.weight, bias, self.eps, self.zero_centered_gamma)

    def _parameter(self, config: Any, hidden_size: int, value: float) -> Parameter:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = Parameter(
            torch.full((hidden_size,), value, dtype=config.params_dtype, device=device)
        )
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * gamma + bias over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(config, hidden_size, 0.0)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gamma over the last dimension."""


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class FluxNorm:
    """Builds the norm of `config.normalization`: [..., hidden_size] -> the same.

    Before linear layers also where Transformer Engine is installed: its norms took 1.03 to 2.9
    times as long (H200). Names of parameters are torch's and its own: weight, and bias for
    LayerNorm. `ValueError` for another normalization.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        if config.normalization not in NORMS:
            raise ValueError(
                f"normalization is {config.normalization!r}, one of {sorted(NORMS)} expected"
            )
        return NORMS[config.normalization](config, hidden_size, eps)
