"""A step with a timed-out wait or a failed call reaches neither weights nor a checkpoint.

A kernel whose wait times out goes on with the data that it has, and the host learns it later. So
Megatron-LM's loop checks all ranks after the last call of a step, replayed graphs included: before
the optimizer's step, and before a checkpoint is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flux_megatron.integration.replaced import around
from flux_megatron.symm.step_end import confirm_step


def confirm_steps(training: Any) -> None:
    """Let `train_step` and `save_checkpoint` of megatron.training.training check first."""
    signature = inspect.signature(training.train_step)

    @around(training, "train_step")
    def stepping(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        optimizer = signature.bind(*given, **named).arguments["optimizer"]
        around(optimizer, "step")(_confirmed)
        return original(*given, **named)

    around(training, "save_checkpoint")(_confirmed)


def _confirmed(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    confirm_step()
    return original(*given, **named)
