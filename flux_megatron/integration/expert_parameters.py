"""The parameters of Megatron's experts: where they lie, when they are there, where gradients go.

Their identity, names and values stay as Megatron has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flux_megatron.expert_parallel import separate
from flux_megatron.integration.main_grad import placeholder_gradient


def place(parameters: Sequence[Any]) -> None:
    """Give the parameters [N, K] of a linear, one an expert, one storage in their order.

    If one has a main_grad all stay where they are: a buffer of Megatron's may hold it, and a
    frozen one beside it has none.
    """
    if not any(one.is_meta or hasattr(one, "main_grad") for one in parameters):
        separate.in_one_storage(parameters)


def await_gathered(linears: Sequence[torch.nn.Module]) -> None:
    """Wait for what `--overlap-param-gather` brings: Megatron's hooks on modules wait for it, but
    nobody calls these modules.
    """
    for linear in linears:
        for hook in linear._forward_pre_hooks.values():
            if hook.__module__.startswith("megatron.core.distributed"):
                hook(linear, ())


def into_main_grads(
    parameters: Sequence[Any], dy: Tensor, x: Tensor, received: Tensor
) -> Sequence[Tensor | None]:
    """Add the weight gradients to the main_grads, as `gradient_accumulation_fusion` asks for.

    DistributedDataParallel's buffer has these in reverse. Gives what autograd gets instead of
    gradients. `RuntimeError` without main_grads.
    """
    main_grads: list[Any] = [getattr(parameter, "main_grad", None) for parameter in parameters]
    if any(main_grad is None for main_grad in main_grads):
        raise RuntimeError(
            "gradient_accumulation_fusion: a weight of the experts has no main_grad, one from "
            "Megatron's DistributedDataParallel expected"
        )
    separate.add_weight_gradients(main_grads, dy, x, received)
    return _placeholders(parameters, x.dtype)


def _placeholders(parameters: Sequence[Any], dtype: torch.dtype) -> list[Tensor | None]:
    """One dummy for all: autograd takes each of these aliases without a copy."""
    dummies = [placeholder_gradient(parameters[0], dtype)]
    for parameter in parameters[1:]:
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
        dummies.append(None if dummies[0] is None else dummies[0].detach())
    return dummies
