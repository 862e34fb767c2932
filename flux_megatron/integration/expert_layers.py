"""Megatron's experts with both GEMMs inside the all-to-all, for each of its classes of experts.

| Megatron's class | its parameters | ours |
| --- | --- | --- |
| `SequentialMLP` | `local_experts.E.linear_fc1.weight` [N, K] | `FluxExperts` |
| `TEGroupedMLP` | `linear_fc1.weightE` [N, K] | `FluxGroupedExperts` |

They have the same parameters under the same names. Those of one linear are read where they lie: in
one storage from the beginning, in Megatron's buffers later (`expert_parameters`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import activations, tensor_parallel
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.moe import experts as stock
from torch import Tensor
from torch.nn import functional

from flux_megatron.expert_parallel import activation, kept_rows, once, separate
from flux_megatron.expert_parallel.call import most_tokens
from flux_megatron.integration import arm, expert_parameters

LINEARS = ("linear_fc1", "linear_fc2")
activation.NAMES |= {  # the second has it from 0.15 on
    module.quick_gelu: "quick_gelu"
    for module in (activations, fused_bias_geglu) if hasattr(module, "quick_gelu")
}  # fmt: skip


class _Experts:
    """Rows travel within the first GEMM and come back within the second."""

    config: Any
    ep_group: Any
    num_local_experts: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As `Module.to` and its kin call it: what has moved gets one storage again."""
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self._place()
        return result

    def _place(self) -> None:
        for name in LINEARS:
            expert_parameters.place(self._parameters_of(name))

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if arm.stock_now():  # what the dispatcher gives is Megatron's too
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[misc]
        x, counts = permuted_local_hidden_states.contiguous(), tokens_per_expert
        if counts.dtype == torch.bool:  # the routing map: a token travels once
            return self._once(x, counts, permuted_probs), None
        y = self._multiplied(x, counts, self._capacity(x))
        return activation.scaled(y, permuted_probs, self._bias_of_all(), counts.flatten()), None

    def _activated(
        self, hidden: Tensor, received: Tensor, bias: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        config = self.config
        if config.gated_linear_unit:
            clamp = getattr(config, "activation_func_clamp_value", None)  # of 0.15
            offset = getattr(config, "glu_linear_offset", 0.0)
            function = config.activation_func
            if config.bias_activation_fusion and function is functional.silu:
                clamp = None  # Megatron's fused SwiGLU has none
            return activation.gated(hidden, received, function, weights, bias, clamp, offset)
        if bias is not None:
            hidden = activation.biased(hidden, bias, received)
        y = config.activation_func(hidden)
        return y if weights is None else activation.scaled(y, weights)

    def _after_activation(
        self, gemm: Callable[[Tensor], Tensor], hidden: Tensor, received: Tensor,
        *more: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The second GEMM, of what `_activated` makes of the rest: made again for backward where
        the activations of experts are recomputed.
        """
        modules = self.config.recompute_modules or ()
        if self.config.recompute_granularity != "selective" or "moe_act" not in modules:
            return gemm(self._activated(hidden, received, *more))
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)
        y = gemm(checkpoint.checkpoint(self._activated, hidden, received, *more))
        checkpoint.discard_output_and_register_recompute(y)
        return y

    def _capacity(self, x: Tensor) -> int:
        tokens = len(x) // self.config.moe_router_topk
        return max(self._most_of(most_tokens(tokens, self.ep_group, x.device)), len(x), 1)

    def _most_of(self, tokens: int) -> int:
        """The most rows that could come: each token of each rank chooses an expert once."""
        most = min(self.config.moe_router_topk, self.num_local_experts)
        return tokens * most * self.ep_group.size()

    def _parameters_of(self, name: str, kind: str = "weight") -> list[Any]:
        """Of a linear, or its biases: one an expert."""
        raise NotImplementedError

    def _linears(self) -> list[torch.nn.Module]:
        raise NotImplementedError

    def _bias(self, name: str) -> Tensor | None:
        """Of a linear [E, N]; behind `_there`."""
        biased = self.config.add_bias_linear
        return torch.stack(self._parameters_of(name, "bias")) if biased else None

    def _bias_of_all(self) -> Tensor | None:
        """That of the second linear [experts of all ranks, N], whose rows are here by now."""
        if (own := self._bias("linear_fc2")) is None:
            return None
        return tensor_parallel.gather_from_sequence_parallel_region(own, group=self.ep_group)

    def _there(self) -> tuple[list[Any], list[Any], separate.Wgrad | None]:
        """The parameters of both linears when they are there, and what takes their gradients."""
        expert_parameters.await_gathered(self._linears())
        first, second = (self._parameters_of(name) for name in LINEARS)
        fuses = self._fuses_wgrad(first + second)
        return first, second, expert_parameters.into_main_grads if fuses else None

    def _once(self, x: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
        first, second, wgrad = self._there()
        group, reverse = self.ep_group, once.lie_in_reverse(first)
        if reverse:  # rows lie as parameters do
            first, second = first[::-1], second[::-1]
        of_rows = self._bias("linear_fc1")
        if of_rows is not None and reverse:
            of_rows = of_rows.flip(0)
        tokens, sent = len(x), [x, chosen, probs]
        if (most := most_tokens(tokens, group, x.device)) > tokens:  # those behind choose nobody
            sent = [functional.pad(one, (0, 0, 0, most - tokens)) for one in sent]
        topk, capacity = self.config.moe_router_topk, self._most_of(most)
        others = max(self.num_local_experts, group.size())
        with kept_rows.keeping(capacity, topk * tokens, others, x.device) as kept:
            routes, weights = once.route(
                sent[1], sent[2], group, topk=topk, capacity=capacity, reverse=reverse
            )
            rows = once.send(sent[0], routes, group)
            hidden = once.multiply(rows, first, routes, wgrad)
            y = self._after_activation(
                lambda rows: once.multiply(rows, second, routes, wgrad),
                hidden, routes.received, of_rows, weights,
            )  # fmt: skip
            kept.counted(routes.received)
        y, bias = once.give_back(y, routes, group)[:tokens], self._bias_of_all()
        # one GEMM of [T, R E]; a bias a row would be some ten passes over a buffer of R T rows
        return y if bias is None else (y + (probs * chosen).float() @ bias.float()).to(y.dtype)

    def _multiplied(self, x: Tensor, counts: Tensor, capacity: int) -> Tensor:
        first, second, wgrad = self._there()
        group = self.ep_group

        def combined(rows: Tensor) -> Tensor:
            return separate.gemm_a2a(rows, second, counts, group, tokens=len(x), wgrad=wgrad)

        others = max(self.num_local_experts, group.size())
        with kept_rows.keeping(capacity, len(x), others, x.device) as kept:
            hidden, received = separate.a2a_gemm(
                x, first, counts, group, capacity=capacity, wgrad=wgrad
            )
            y = self._after_activation(combined, hidden, received, self._bias("linear_fc1"))
            kept.counted(received)
        return y

    def _fuses_wgrad(self, parameters: list[Any]) -> bool:
        """Gradients of Megatron's FSDP, and of experts of which some are frozen, go by autograd."""
        return self.config.gradient_accumulation_fusion and all(
            one.requires_grad and not hasattr(one, "__fsdp_param__") for one in parameters
        )


def _own(linear: torch.nn.Module, name: str) -> Any:
    """A parameter of a linear that nothing stands around: an adapter would never be called."""
    if name not in linear._parameters:
        raise ValueError(
            f"{type(linear).__qualname__} given in place of an experts' linear layer, whose {name} "
            "is read and which is never called: build models with adapters around experts without "
            "--flux-experts, experts=True and FLUX_MEGATRON_EXPERTS"
        )
    return linear._parameters[name]


class FluxExperts(_Experts, stock.SequentialMLP):
    """Takes the place of `SequentialMLP`."""

    def _parameters_of(self, name: str, kind: str = "weight") -> list[Any]:
        return [_own(getattr(expert, name), kind) for expert in self.local_experts]

    def _linears(self) -> list[torch.nn.Module]:
        return [getattr(expert, name) for expert in self.local_experts for name in LINEARS]


class FluxGroupedExperts(_Experts, stock.TEGroupedMLP):
    """Takes the place of `TEGroupedMLP`; TransformerEngine holds the parameters."""

    def _parameters_of(self, name: str, kind: str = "weight") -> list[Any]:
        linear = getattr(self, name)
        return [_own(linear, f"{kind}{expert}") for expert in range(self.num_local_experts)]

    def _linears(self) -> list[torch.nn.Module]:
        return [getattr(self, name) for name in LINEARS]


OURS: dict[str, type] = {"SequentialMLP": FluxExperts, "TEGroupedMLP": FluxGroupedExperts}
