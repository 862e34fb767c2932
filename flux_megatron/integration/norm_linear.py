"""A norm and the column-parallel layer behind it as one module, as TransformerEngine has them."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from flux_megatron.integration.layers import FluxColumnParallelLinear
from flux_megatron.integration.norm import FluxNorm, normalised


class FluxLayerNormColumnParallelLinear(FluxColumnParallelLinear):
    """x [s / R, b, K] -> (norm(x) @ w^T [s, b, N / R], bias or None).

    Stands where Megatron builds a `TELayerNormColumnParallelLinear`. Parameters have its names and
    its order, by which optimizers number their states: layer_norm_weight, layer_norm_bias (none
    for RMSNorm), weight, bias. All are this module's own, because data parallelism gathers the
    parameters of a module before its forward. `ValueError` for a normalization other than
    LayerNorm and RMSNorm.

    Adapters ask for the norm's output as they ask TransformerEngine's layer: forward returns
    ((y, norm(x)), bias), with the rows of all ranks if `return_layernorm_output_gathered`.
    """

    delays = True
    return_layernorm_output = False
    return_layernorm_output_gathered = False

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        self.eps = self.config.layernorm_epsilon
        self.zero_centered_gamma = self.config.layernorm_zero_centered_gamma
        norm = FluxNorm(self.config, input_size, self.eps)
        self.register_parameter("layer_norm_weight", norm.weight)
        self.register_parameter("layer_norm_bias", getattr(norm, "bias", None))
        for name in ("weight", "bias"):  # behind the norm's
            self._parameters[name] = self._parameters.pop(name)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        x = normalised(input_, gamma, beta, self.eps, self.zero_centered_gamma)
        y, bias = super().forward(x, *args, **kwargs)
        if not self.return_layernorm_output:
            return y, bias
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return (y, x), bias
