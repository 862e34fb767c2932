"""`--delay-wgrad-compute`: backward leaves the weight's gradient to `backward_dw`.

Megatron calls that beside the experts' communication of another micro-batch. The protocol is that
of TransformerEngine's layers: Megatron's data parallelism finds the mark on the weight and gives
the layer what it would have hooked into autograd.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flux_megatron.integration.main_grad import into_main_grad, placeholder_gradient
from flux_megatron.nn.linear_passes import Wgrad


class DelayedWgrad:
    """For a linear layer of Megatron's; stands before its class.

    Backward does all that needs other ranks, and the gradient of the bias. Rows that it gathered
    are borrowed, so they are copied, and stay in memory until `backward_dw`.
    """

    weight: Any
    delays = False  # as megatron-core's own layers, whose `backward_dw` nobody calls
    delayed_wgrads: deque[Callable[[], object]] | None = None  # None: nothing is delayed
    wgrad_hooks: tuple[Callable[[], None], ...] = ()

    def delay_wgrad(self) -> None:
        self.delayed_wgrads = deque()
        self.weight.skip_backward_post_hook = True

    def need_backward_dw(self) -> bool:
        return self.delayed_wgrads is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_hooks += (hook,)

    def backward_dw(self) -> None:
        """Compute what backward left, into main_grad where that is fused, else into `grad`.

        The hooks run also where Megatron's own code has computed it in backward.
        """
        with torch.no_grad():
            while self.delayed_wgrads:
                self.delayed_wgrads.popleft()()
        for hook in self.wgrad_hooks:
            hook()

    def wgrad_of(self, weight: Any, fused: bool, borrowed: str | None) -> Wgrad | None:
        """The `wgrad` of one forward for `nn.functions`. `borrowed`: whether its "x" or "dy" is in
        gathered rows.
        """
        now = into_main_grad(weight) if fused else None
        delayed = self.delayed_wgrads
        if delayed is None:
            return now

        def later(_: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
            dy = dy.clone() if borrowed == "dy" else dy
            x = x.clone() if borrowed == "x" else x
            delayed.append(functools.partial(now or _into_grad, weight, dy, x))
            return placeholder_gradient(weight, x.dtype) if fused else None

        return later


def _into_grad(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """As autograd's accumulation, which had nothing to add."""
    dw = dy.t() @ x
    weight.grad = dw if weight.grad is None else weight.grad + dw
