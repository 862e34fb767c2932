"""Routers of Megatron's that choose the first expert for a share of all tokens, and what they would
choose anyway for the rest of its experts. In all arms alike.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

SKEW = "ROUTER_SKEW"  # variable of a script's ranks: the share


def raised(logits: Tensor, share: float) -> Tensor:
    """The logits [..., experts], the first of every 1/share-th token above all others."""
    tokens = torch.arange(logits[..., 0].numel(), device=logits.device).view(logits.shape[:-1])
    highest = logits.detach().amax(-1) + 1
    made = logits.clone()
    made[..., 0] = torch.where((tokens * share).frac() >= 1 - share, highest, logits[..., 0])
    return made


def use(share: float, router: Any) -> None:
    """`router`: Megatron's `TopKRouter`."""
    routing = router.routing

    @functools.wraps(routing)
    def skewed(self: Any, logits: Tensor, *more: Any, **named: Any) -> Any:
        return routing(self, raised(logits, share), *more, **named)

    router.routing = skewed
