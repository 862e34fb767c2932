"""A Mixture of Experts of Megatron's whose all-to-all is hidden behind the experts' GEMMs.

`FluxTokenDispatcher` takes the place of Megatron's all-to-all and all-gather dispatchers, and
leaves the rows where they are: it sorts them by expert and counts them, on the device. The experts
(`expert_layers`) send them within their first GEMM and get them back within their second, so they
multiply by the router's probabilities where the rows came from: the second GEMM is linear.

With FLUX_MEGATRON_EXPERTS_ONCE=1 it does not even sort: the experts get tokens and choices as the
router gives them, and a token travels once to a rank.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import experts as stock_experts
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from flux_megatron import settings
from flux_megatron.expert_parallel import once
from flux_megatron.integration import arm
from flux_megatron.integration.expert_layers import OURS
from flux_megatron.integration.replaced import around

# those whose place ours takes: --moe-token-dispatcher-type
DISPATCHERS = {
    "alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher",
}  # fmt: skip


def use(undo: contextlib.ExitStack) -> None:
    """Models that are built until `undo` closes have our dispatcher and experts where they would
    have Megatron's, whatever specifies them.
    """
    for dispatcher in DISPATCHERS.values():
        _become(undo, getattr(token_dispatcher, dispatcher), FluxTokenDispatcher)
    for name, ours in OURS.items():
        _become(undo, getattr(stock_experts, name), ours)


def _become(undo: contextlib.ExitStack, stock: type, ours: type) -> None:
    @around(stock, "__init__", undo)
    def becoming(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not stock:
            original(self, *args, **kwargs)
            return
        self.__class__ = ours
        ours.__init__(self, *args, **kwargs)  # type: ignore[misc]
        if reason := _apart(vars(self)["config"]):
            raise ValueError(f"our experts cannot run this model: {reason}")


def _apart(config: Any) -> str | None:
    """Why the dispatcher or the experts of a model stay Megatron's, where the other is ours."""
    if (given := config.moe_token_dispatcher_type) not in DISPATCHERS:
        expected = " or ".join(DISPATCHERS)
        return f"moe_token_dispatcher_type {given} given, {expected} expected"
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return "transformer_impl inference_optimized given, which has experts of its own"
    return None


def or_stock(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A method of our dispatcher; Megatron's own in the stock arm of `--flux-compare`."""

    @functools.wraps(ours)
    def method(self: FluxTokenDispatcher, *given: Any, **named: Any) -> Any:
        if not arm.stock_now():
            return ours(self, *given, **named)
        stock = getattr(super(FluxTokenDispatcher, self), ours.__name__)
        return stock(*given, **named)

    return method


class FluxTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Rows stay until the experts' first GEMM; `tokens_per_expert` is int32 [ranks, experts of
    each], the counts of this rank's rows. Where a token travels once, rows are all tokens,
    `tokens_per_expert` is the routing map, and probabilities are those of all experts.
    """

    tokens_per_expert: Any
    once: bool  # whether a token of this call travels once
    beside: Any = None  # the shared experts with --moe-shared-expert-overlap

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reason := why_not(self.config, self.tp_size):
            raise ValueError(f"our experts cannot run this model: {reason}")

    @property
    def shared_experts(self) -> Any:
        """None for ours: they run on a stream of their own, beside all that the others do."""
        return self.beside if arm.stock_now() else None

    @shared_experts.setter
    def shared_experts(self, given: Any) -> None:
        self.beside = given

    @or_stock
    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.beside is not None:
            self.beside.pre_forward_comm(hidden_states)
            self.beside.linear_fc1_forward_and_act()
            self.beside.linear_fc2_forward()
            self.beside.post_forward_comm()
        self.once = self._sends_once(hidden_states)
        if not self.once:
            if self.config.moe_expert_capacity_factor:
                raise ValueError("tokens are dropped, which needs that each travels once")
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape, self.tokens_per_expert = hidden_states.shape, routing_map
        return hidden_states.view(-1, hidden_states.shape[-1]), probs

    def _sends_once(self, hidden_states: Tensor) -> bool:
        if not settings.get().experts_once:
            return False
        reason = once.refuses(hidden_states, self.ep_group)
        if reason is not None:
            said = "a token travels once to each of its experts, not of its ranks"
            warnings.warn(f"flux_megatron: {said}: {reason}", stacklevel=2)
        return reason is None

    @or_stock
    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        if self.once:
            y = hidden_states.view(self.hidden_shape)
        else:
            y = super().combine_postprocess(hidden_states)
        return y if self.beside is None else y + self.beside.get_output()

    @or_stock
    def preprocess(self, routing_map: Tensor) -> Tensor:
        self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        counts = routing_map.sum(0, dtype=torch.int32)
        return counts.view(self.ep_size, self.num_local_experts)

    @or_stock
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    @or_stock
    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return hidden_states, counts, probs

    @or_stock
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    @or_stock
    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @or_stock
    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Nothing is fetched, and nobody waits."""
        return tokens_per_expert


def why_not(config: Any, tp_size: int) -> str | None:
    """Why the dispatcher cannot run a model of this configuration, or None. Megatron's arguments
    have the same names. `tp_size`: of the experts.
    """
    unsupported = {
        "moe_expert_capacity_factor": "tokens are dropped without FLUX_MEGATRON_EXPERTS_ONCE=1",
        "moe_pad_expert_input_to_capacity": "experts are padded",
        "moe_router_padding_for_quantization": "the routing map is padded",
        "moe_router_padding_for_fp8": "the routing map is padded",
        "moe_apply_probs_on_input": "probabilities come before the first GEMM",
        "moe_use_legacy_grouped_gemm": "the experts of a linear are one parameter",
        "moe_single_grouped_weight": "the experts of a linear are one parameter",
        "moe_single_grouped_bias": "the biases of a linear are one parameter",
        "use_transformer_engine_op_fuser": "TransformerEngine fuses the experts' operations",
        "moe_mlp_glu_interleave_size": "gates and linear halves are interleaved",
        "overlap_moe_expert_parallel_comm": "Megatron overlaps the all-to-all itself",
        "delay_wgrad_compute": "weight gradients are computed later",
        "overlap_dispatch_backward_with_experts_wgrad": "weight gradients are computed later",
        "fp8": "experts are fp8", "fp4": "experts are fp4",
    }  # fmt: skip
    if settings.get().experts_once:  # rows are counted by the routing map alone
        del unsupported["moe_expert_capacity_factor"]
    for name, reason in unsupported.items():
        if getattr(config, name, None):
            return f"{reason} ({name})"
    before_0_16 = ("enable_cuda_graph", "external_cuda_graph")
    graphs = (getattr(config, "cuda_graph_impl", None) or "none") != "none" or any(
        getattr(config, name, False) for name in before_0_16
    )
    if getattr(config, "moe_shared_expert_overlap", False) and graphs:
        return "shared experts run beside the others in a CUDA graph (moe_shared_expert_overlap)"
    if tp_size > 1:
        given = f"experts are divided over {tp_size} tensor-parallel ranks"
        return f"{given}, 1 expected (--expert-tensor-parallel-size 1)"
    return None
