"""The participants of a case: a name, and a call or the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.dispatch import decide
from flux_megatron.problem import Pattern

Call = Callable[[], tuple[Any, ...]]  # tensors


@dataclass(frozen=True)
class Candidate:
    """`call` returns the results of the case; `reason` says why there is no call.

    A `local` candidate only multiplies: its result is this rank's GEMM, without communication.
    `plan` gives the plan of ours as JSON after a call.
    """

    name: str
    role: str
    call: Call | None
    reason: str = ""
    local: bool = False
    plan: Callable[[], str] | None = None


def with_strategy(strategy: str, function: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """A call of `function` under FLUX_MEGATRON_STRATEGY=`strategy`, as a tuple of results."""

    def call() -> tuple[Any, ...]:
        if settings.get().strategy != strategy:
            os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
            settings.reload()
        result = function(*args, **options)
        return result if isinstance(result, tuple) else (result,)

    return call


def plan_of_auto(
    pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, layout: str
) -> Callable[[], str]:
    """A function that gives the chosen plan of a call of x and w as JSON. It is collective."""

    def plan() -> str:
        return decide(pattern, x, w, None, group, layout, None).plan.dumps()

    return lambda: with_strategy("auto", plan)()[0]
