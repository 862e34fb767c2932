"""What a call would launch, of tensors without memory: kernels as their launchers fix them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from flux_megatron.kernels import triton_launch
from flux_megatron.kernels.triton_launch import Launcher


def memory(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launchers_of(call: Callable[[], object]) -> list[Launcher]:
    """In their order. No two calls share a launcher."""
    triton_launch._launchers.clear()
    made: list[Launcher] = []
    with mock.patch.object(Launcher, "launch", lambda one, *given: made.append(one)):
        call()
    return made
