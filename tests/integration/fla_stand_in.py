"""A stand-in for flash-linear-attention: what gated delta nets call in training, in torch."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE = "megatron.core.ssm.gated_delta_net"


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: Any
) -> tuple[Tensor, None]:
    """[batch, length, channels] -> the same, each channel by itself."""
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).transpose(1, 2), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """q, k [batch, length, heads, keys], v of values; g and beta [batch, length, heads]."""
    return _read_and_write(q, k, g[..., None], beta[..., None] * k, beta[..., None] * v), None


def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The same with a decay g and gates b and w of each channel."""
    return _read_and_write(q, k, g, b * k, w * v), None


def _read_and_write(q: Tensor, k: Tensor, g: Tensor, erased: Tensor, written: Tensor) -> Tensor:
    """Token after token: the state decays, forgets what it has for a key, and learns a value."""
    state, made = q.new_zeros(*k[:, 0].shape, written.shape[-1]), []
    for n in range(q.shape[1]):
        state = state * g[:, n, :, :, None].exp()
        found = (state * erased[:, n, :, :, None]).sum(-2)
        state = state + k[:, n, :, :, None] * (written[:, n] - found)[..., None, :]
        made.append((state * q[:, n, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(made, 1)


def install() -> None:
    """Be there for Megatron's modules of such nets: one file, or from 0.19 on several."""
    theirs = {function.__name__: function for function in (
        l2norm, causal_conv1d, chunk_gated_delta_rule, chunk_gdn2
    )}  # fmt: skip
    theirs |= {"HAVE_FLA": True, "HAVE_FLA_GDN2": True}
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE):
            vars(module).update(theirs)
