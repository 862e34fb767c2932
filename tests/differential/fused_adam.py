"""Adam as TransformerEngine and apex have it: one step count for a group, not one for a parameter.

Megatron's distributed optimizer can save with torch's Adam, but not load: what a run resumes from
is known only to one that has stepped.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Computed by torch, one parameter after the other."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, adam_w_mode: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.decoupled = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad, decay = self.state[parameter], parameter.grad, group["weight_decay"]
        (beta1, beta2), step = group["betas"], group["step"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        if not self.decoupled:
            grad = grad + decay * parameter
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        if self.decoupled:
            parameter.mul_(1 - group["lr"] * decay)
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))


def install() -> None:
    """Let Megatron find it, instead of torch's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
