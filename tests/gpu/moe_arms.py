"""Megatron's MoE layer as `moe_layer.py` compares it: an arm is one way to build it.

All arms have the same weights. Those of Megatron's own dispatcher are built before `experts.use()`.
`copied` is `ours` whose parameters were given a storage each, so that each forward stacks them;
`ours, grouped` has TransformerEngine's grouped linears.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_run import Run
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from flux_megatron.integration import experts
from flux_megatron.train.cpu_device import pretend_cuda

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
STOCK, GROUPED, OURS, COPIED = "sequential", "grouped", "ours", "copied"
OURS_GROUPED = "ours, grouped"
LINEARS = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Model:
    """Of one layer; `tokens` a rank."""

    name: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int


def start(run: Run) -> None:
    """Megatron's groups: every rank has its share of the experts."""
    if run.device.type == "cpu":
        pretend_cuda()
        moe_utils.te_general_gemm = None  # up to 0.16 asked for also where there is none
        token_dispatcher.all_to_all = _with_lists
    parallel_state.initialize_model_parallel(expert_model_parallel_size=run.group.size())


def build(run: Run, model: Model, fused: bool) -> dict[str, Any]:
    """The layer of each arm; `fused` permutations and activations where there are some."""
    grouped = HAS_TE and run.device.type == "cuda"
    arms = {name: _layer(run, model, name, fused) for name in [STOCK, *[GROUPED] * grouped]}
    with _ours():
        for name in (OURS, COPIED, *[OURS_GROUPED] * grouped):
            arms[name] = _layer(run, model, name, fused)
    for layer in arms.values():
        _copy_weights(arms[STOCK], layer)
    for weights in parameters(arms[COPIED]).values():
        for weight in weights:
            weight.data = weight.data.clone()
    return arms


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Layers built in this context are those of `--flux-experts`."""
    modules = (experts.backends, experts.transformer_engine_spec_provider)
    names = [(module, name) for module in modules for name in experts.OURS if hasattr(module, name)]
    names.append((experts.moe_layer, "MoEAlltoAllTokenDispatcher"))
    with contextlib.ExitStack() as stack:
        for module, name in names:  # set again to what they are now when the context ends
            stack.enter_context(mock.patch.object(module, name, getattr(module, name)))
        experts.use()
        yield


def parameters(layer: Any) -> dict[str, list[Tensor]]:
    """Weights by name, those of linears one for each expert of this rank."""
    if hasattr(layer.experts, "local_experts"):
        found = {
            name: [getattr(expert, name).weight for expert in layer.experts.local_experts]
            for name in LINEARS
        }
    else:
        modules = {name: getattr(layer.experts, name) for name in LINEARS}
        count = layer.experts.num_local_experts
        found = {
            name: [getattr(module, f"weight{e}") for e in range(count)]
            for name, module in modules.items()
        }
    return {"router": [layer.router.weight], **found}


def step(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    """Forward and backward of x [tokens, 1, hidden]; gradients are new ones."""
    x.grad = None
    for one in layer.parameters():
        one.grad = None
    y, _ = layer(x)
    y.backward(dy)
    return y.detach()


def _layer(run: Run, model: Model, arm: str, fused: bool) -> Any:
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)
    dtype, on_gpu = getattr(torch, run.about.dtype), run.device.type == "cuda"
    config = TransformerConfig(
        num_layers=1, hidden_size=model.hidden, num_attention_heads=4, ffn_hidden_size=model.ffn,
        moe_ffn_hidden_size=model.ffn, num_moe_experts=model.experts, moe_router_topk=model.topk,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        expert_model_parallel_size=run.group.size(), add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, gradient_accumulation_fusion=False,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, use_cpu_initialization=not on_gpu,
        moe_grouped_gemm=arm in (GROUPED, OURS_GROUPED), bias_activation_fusion=fused and on_gpu,
        moe_permute_fusion=fused and on_gpu and HAS_TE,
    )  # fmt: skip
    grouped = arm in (GROUPED, OURS_GROUPED)
    spec = get_moe_module_spec(use_te=grouped, num_experts=model.experts, moe_grouped_gemm=grouped)
    layer = build_module(spec, config=config).to(run.device)
    layer.set_layer_number(1)
    return layer


def _copy_weights(source: Any, layer: Any) -> None:
    with torch.no_grad():
        for name, weights in parameters(layer).items():
            right = parameters(source)[name]
            for weight, other in zip(weights, right, strict=True):
                weight.copy_(other)
            if name == "router":
                dist.broadcast(weights[0], 0)


def _with_lists(group: Any, rows: Tensor, received: Tensor, sent: Tensor, **more: Any) -> Tensor:
    """Splits lie on the CPU as they are there after a copy from a GPU."""
    return tensor_parallel.all_to_all(group, rows, received.tolist(), sent.tolist(), **more)


def reference(run: Run, layer: Any, x: Tensor, dy: Tensor) -> dict[str, list[Tensor]]:
    """y, dx and the gradients of this rank's weights in fp64, for the experts that the layer's
    router chooses. Collective: experts come one by one to all tokens.
    """
    with torch.no_grad():
        chosen = layer.router(x)[1].bool()
    rows = x.detach().flatten(0, 1).double().requires_grad_()
    router = layer.router.weight.detach().double().requires_grad_()
    logits = (rows @ router.t()).masked_fill(~chosen, float("-inf"))
    probs = logits.softmax(-1)
    weights = parameters(layer)
    here, dys = len(weights[LINEARS[0]]), dy.flatten(0, 1).double()
    y, dx, dprobs = torch.zeros_like(dys), torch.zeros_like(dys), torch.zeros_like(probs)
    found: dict[str, list[Tensor]] = {name: [] for name in LINEARS}
    for owner, e in itertools.product(range(run.group.size()), range(here)):
        expert, mine = owner * here + e, owner == run.group.rank()
        pair = [weights[name][e].detach().clone() for name in LINEARS]
        for one in pair:
            dist.broadcast(one, owner)
        first, second = (one.double().requires_grad_() for one in pair)
        tokens = chosen[:, expert].nonzero()[:, 0]
        part = rows.detach()[tokens].requires_grad_()
        share = probs.detach()[tokens, expert].requires_grad_()
        gate, linear = (part @ first.t()).chunk(2, -1)
        out = (F.silu(gate) * linear) @ second.t() * share[:, None]
        grads = torch.autograd.grad(out, (part, share, first, second), dys[tokens])
        y[tokens] += out.detach()
        dx[tokens] += grads[0]
        dprobs[tokens, expert] = grads[1]
        for name, gradient in zip(LINEARS, grads[2:], strict=True):
            dist.all_reduce(gradient)
            if mine:
                found[name].append(gradient)
    of_router = torch.autograd.grad(probs, (rows, router), dprobs)
    return {"y": [y], "dx": [dx + of_router[0]], "router": [of_router[1]], **found}
