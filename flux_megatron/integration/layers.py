"""megatron-core's tensor-parallel linear layers with their communication behind their GEMMs.

Subclasses: constructors, parameters, attributes and checkpoints are megatron-core's, and so is what
surrounds the GEMM. Column is taken over around its GEMM, Row as a whole, because its collective
stands outside the method around its GEMM.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as stock
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch import Tensor

from flux_megatron.integration import arm, seams
from flux_megatron.integration.delayed_wgrad import DelayedWgrad
from flux_megatron.integration.main_grad import placeholder_gradient
from flux_megatron.nn import functions
from flux_megatron.ops import note_fallback
from flux_megatron.wgrad import Deferred

# options of `_forward_impl` that these layers know, and the neutral values of others if not None
_UNDERSTOOD = {
    "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group",
    "grad_output_buffer", "wgrad_deferral_limit",
}  # fmt: skip
_OFF = {"gtp_remat_size": 1}


class FluxColumnParallelLinear(DelayedWgrad, ColumnParallelLinear):
    """megatron-core's `ColumnParallelLinear`: x [s / R, b, K] -> (y [s, b, N / R], bias or None).

    Under sequence parallelism forward is AG+GEMM and backward GEMM+RS. `save_gathered = True`, on
    the class or a layer, keeps the gathered x for the weight gradient: R times the memory, one
    gather less. Without, x is [s, b, K], forward needs no communication and backward is GEMM+AR.

    Deferring the embedding's weight gradient needs apex, whose kernel Megatron itself calls then,
    or `apex_shim.provide_wgrad_kernels()`: `RuntimeError` without.
    """

    save_gathered = False
    beside: tuple[str, ...] = ()  # fields that ask for what layers beside it do
    unknown_arguments: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["config"]
        seams.check_config(config, self.beside)
        # megatron-core's constructor refuses fusion without apex, which is not needed here
        without = copy.copy(config)
        without.gradient_accumulation_fusion = False
        super().__init__(*args, **{**kwargs, "config": without})
        self.config = config
        if unknown := seams.unknown_arguments(ColumnParallelLinear, kwargs):
            self.unknown_arguments = unknown
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        _tag(self, 0, kwargs)
        # in every layer, so that pipeline stages without an LM head refuse too, and do not wait
        if config.defer_embedding_wgrad_compute and not stock._grad_accum_fusion_available:
            raise RuntimeError(
                "defer_embedding_wgrad_compute needs apex's fused_weight_gradient_mlp_cuda, which "
                "Megatron calls when the pipeline drains: install apex, or call "
                "flux_megatron.integration.apex_shim.provide_wgrad_kernels() first"
            )
        if config.defer_embedding_wgrad_compute and self.grad_output_buffer is None:
            # megatron-core's forward keeps the input of every layer, not the LM head's alone
            self.embedding_activation_buffer: Any = deque(maxlen=0)
        if config.delay_wgrad_compute and self.delays:
            self.delay_wgrad()

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        buffer = kwargs["grad_output_buffer"]
        if buffer is not None and torch.is_grad_enabled() and not weight.requires_grad:
            raise ValueError("a frozen weight given, but its gradient is deferred")
        if arm.stock_now():
            return super()._forward_impl(input=input, weight=weight, **_for_megatron(kwargs))
        if reason := _left_to_megatron(self, input, kwargs):
            if kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"]:
                note_fallback("ag_gemm" if kwargs["sequence_parallel"] else "gemm_ar", reason)
            return super()._forward_impl(input=input, weight=weight, **_for_megatron(kwargs))
        gathers = kwargs["sequence_parallel"] and not self.save_gathered
        wgrad = self.wgrad_of(
            weight, self.gradient_accumulation_fusion, borrowed="x" if gathers else None
        )
        if buffer is not None and weight.requires_grad and self._was_kept(input):
            wgrad = _into_buffer(buffer, weight, input.shape[1:-1])
        if kwargs["sequence_parallel"]:
            return functions.column_parallel_linear(
                input, weight, kwargs["bias"], group=self.tp_group, wgrad=wgrad,
                save_gathered=self.save_gathered,
            )  # fmt: skip
        return functions.local_linear(
            input, weight, kwargs["bias"], wgrad=wgrad,
            allreduce_group=self.tp_group if kwargs["allreduce_dgrad"] else None,
        )  # fmt: skip

    def _was_kept(self, input: Tensor) -> bool:
        """Whether `forward` kept this input for a deferred gradient: past a limit it does not."""
        kept = self.embedding_activation_buffer
        return bool(kept) and kept[-1] is input


class FluxRowParallelLinear(DelayedWgrad, RowParallelLinear):
    """megatron-core's `RowParallelLinear`: x [s, b, K / R] -> (y [s / R, b, N], bias or None).

    Under sequence parallelism forward is GEMM+RS and backward AG+GEMM, which leaves the gathered dy
    to the weight gradient. Without, y is [s, b, N], forward is GEMM+AR and backward needs no
    communication.
    """

    beside: tuple[str, ...] = ()
    unknown_arguments: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seams.check_config(kwargs["config"], self.beside)
        super().__init__(*args, **kwargs)
        if unknown := seams.unknown_arguments(RowParallelLinear, kwargs):
            self.unknown_arguments = unknown
        _tag(self, 1, kwargs)
        if self.config.delay_wgrad_compute and self.delays:
            self.delay_wgrad()

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        options = {"gtp_remat_size": getattr(self, "gtp_remat_size", 1)}
        ours = self._communicates() and not arm.stock_now()
        if not ours or _left_to_megatron(self, input_, options):
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        offloading = self.config._cpu_offloading_context
        if offloading is not None and offloading.inside_context:
            # as the forward that this one replaces: older hooks of TransformerEngine look for it
            input_.activation_offloading = self.config.cpu_offloading_activations  # type: ignore[attr-defined]
        wgrad = self.wgrad_of(
            self.weight, self.gradient_accumulation_fusion,
            borrowed="dy" if self.sequence_parallel else None,
        )  # fmt: skip
        linear = functions.row_parallel_linear if self.sequence_parallel else functions.row_linear
        output = linear(input_, self.weight, group=self.tp_group, wgrad=wgrad)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        """The GEMM alone; megatron-core's forward communicates around it."""
        if arm.stock_now():
            return super()._forward_impl(input=input, weight=weight, **_for_megatron(kwargs))
        if reason := _left_to_megatron(self, input, kwargs):
            if self._communicates():
                note_fallback("gemm_rs" if self.sequence_parallel else "gemm_ar", reason)
            return super()._forward_impl(input=input, weight=weight, **_for_megatron(kwargs))
        wgrad = self.wgrad_of(weight, self.gradient_accumulation_fusion, borrowed=None)
        return functions.local_linear(input, weight, kwargs["bias"], wgrad=wgrad)

    def _communicates(self) -> bool:
        """Experts leave communication to their token dispatcher."""
        return self.tp_group.size() > 1 and not self.explicit_expert_comm


def _tag(layer: Any, dim: int, kwargs: Mapping[str, Any]) -> None:
    """Where nothing is initialised megatron-core up to 0.17 leaves the weight without the tags by
    which norms of gradients count the shards of all ranks; TransformerEngine has them, and zeros in
    the bias.
    """
    if layer.weight is None or layer.config.perform_initialization:
        return
    if not hasattr(layer.weight, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(layer.weight, True, dim, kwargs.get("stride", 1))
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.zero_()


def _into_buffer(buffer: list[Tensor], weight: Any, inner: torch.Size) -> Deferred:
    """A wgrad that leaves dy in Megatron's buffer, in the shape of the layer's output, and gives
    autograd a placeholder. The main_grad is that of forward.
    """
    main_grad = getattr(weight, "main_grad", None)

    def take(weight: Any, dy: Tensor) -> Tensor | None:
        buffer.append(dy.view(-1, *inner, dy.shape[-1]))
        weight.main_grad = main_grad
        return placeholder_gradient(weight, dy.dtype)

    return Deferred(take)


def is_head(kwargs: Mapping[str, Any]) -> bool:
    """Whether a constructor is called for an LM head, which has no name, but can take the weight of
    an embedding.
    """
    return "skip_weight_param_allocation" in kwargs and not kwargs.get("tp_comm_buffer_name")


def layer_of(tp_comm_buffer_name: str | None) -> str | None:
    """qkv for Megatron's qkv, q_up_proj, kv_down_proj and so on; other names are themselves."""
    name = tp_comm_buffer_name
    return "qkv" if name is not None and name.startswith(("q", "kv")) else name


def _for_megatron(options: dict[str, Any]) -> dict[str, Any]:
    """Without apex megatron-core can only return a gradient, which hooks then add to main_grad."""
    fusion = options["gradient_accumulation_fusion"] and stock._grad_accum_fusion_available
    return {**options, "gradient_accumulation_fusion": fusion}


def _left_to_megatron(layer: Any, input: Tensor, options: dict[str, Any]) -> str | None:
    """Why this call is megatron-core's to compute, or None."""
    for name, value in {**options, **layer.unknown_arguments}.items():
        if name not in _UNDERSTOOD and value != _OFF.get(name):
            return f"{name}={value} is computed by megatron-core"
    if torch.is_autocast_enabled(input.device.type):
        return "autocast chooses the dtype of the GEMM"
    return None
