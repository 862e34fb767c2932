"""A step with a timed-out wait or a failed call reaches neither weights nor a checkpoint.

A kernel whose wait times out goes on with the data that it has, and the host learns it later. So
Megatron-LM's loop checks all ranks after the last call of a step, replayed graphs included: before
the optimizer's step, and before a checkpoint is written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flux_megatron.symm.step import confirm_step


def confirm_steps(training: Any) -> None:
    """Let `train_step` and `save_checkpoint` of the module megatron.training.training check first.

    Both are found by these names in every version from 0.14 on.
    """
    original = training.train_step
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*given: Any, **named: Any) -> Any:
        optimizer = signature.bind(*given, **named).arguments["optimizer"]
        if not hasattr(optimizer.step, "confirmed"):
            optimizer.step = _confirmed(optimizer.step)
        return original(*given, **named)

    training.train_step = train_step
    training.save_checkpoint = _confirmed(training.save_checkpoint)


def _confirmed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def confirmed(*given: Any, **named: Any) -> Any:
        confirm_step()
        return function(*given, **named)

    confirmed.confirmed = True  # type: ignore[attr-defined]
    return confirmed
