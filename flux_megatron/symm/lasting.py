"""What is made in one call and serves later ones keeps no mode of its first caller.

A first call may come under inference mode, a default dtype or device, fake tensors or a transform
of functorch. A tensor that is made under one of these belongs to it: an inference tensor refuses
training's writes, a fake one has no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def lasting() -> Iterator[None]:
    """`with lasting():`, or `@lasting()`, around all that makes, caches or fills what later calls
    use.

    The dtype of such a tensor is given: torch's default is the process's, other threads read it.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),  # the line above turns gradients on
        torch._C._DisableFuncTorch(),
        torch._C.DisableTorchFunction(),  # a default device is a mode of these
        _disable_current_modes(),
    ):
        yield
