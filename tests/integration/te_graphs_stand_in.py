"""A stand-in for TransformerEngine's `make_graphed_callables`, as Megatron's helper calls it: what
is captured is called again in place of a replay.

Warm-up, static inputs, gradients by `torch.autograd.grad` and what a replay leaves alone, such as
marks on parameters, are as in transformer_engine/pytorch/graph.py of 2.11. One micro-batch.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs


def install() -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):  # asked for at each replay
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    cuda_graphs.HAVE_TE_GRAPHS = True
    cuda_graphs.make_graphed_callables = make_graphed_callables


def make_graphed_callables(
    layers: tuple[torch.nn.Module, ...], sample_args: list[Any], *, sample_kwargs: list[Any],
    num_warmup_iters: int, allow_unused_input: bool, _order: list[int], **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    assert _order == [1, -1]
    made = []
    for layer, args, kwargs in zip(layers, sample_args, sample_kwargs, strict=True):
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
        assert not any(hooks)
        static = [*args, *kwargs.values()]
        inputs = [one for one in (*static, *layer.parameters()) if one.requires_grad]
        for _ in range(num_warmup_iters):
            outputs = layer(*args, **kwargs)
            dy = [torch.empty_like(one) for one in outputs]
            found = torch.autograd.grad(outputs, inputs, dy, allow_unused=allow_unused_input)
            inputs = [one for one, grad in zip(inputs, found, strict=True) if grad is not None]
        made.append(_graphed(layer, args, kwargs, inputs))
    return tuple(made)


def _graphed(layer: torch.nn.Module, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    static, names = [*args, *kwargs.values()], [*kwargs]
    parameters = [one for one in inputs if isinstance(one, torch.nn.Parameter)]
    capture = layer._te_cuda_graph_capture

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                for one, new in zip(static, given, strict=False):
                    one.copy_(new)
            with torch.enable_grad():
                ctx.outputs = capture(*args, **kwargs)
            return tuple(one.detach() for one in ctx.outputs)

        @staticmethod
        def backward(ctx: Any, *dy: torch.Tensor) -> tuple[Any, ...]:
            marks = [getattr(one, "grad_added_to_main_grad", None) for one in parameters]
            found = dict(zip(inputs, torch.autograd.grad(ctx.outputs, inputs, dy), strict=True))
            for one, mark in zip(parameters, marks, strict=True):
                if mark is not None:
                    one.grad_added_to_main_grad = mark
            return tuple(found.get(one) for one in (*static, *parameters))

    def forward(*given: torch.Tensor, **named: Any) -> tuple[torch.Tensor, ...]:
        return Graphed.apply(*given, *(named[name] for name in names), *parameters)

    return forward
