"""A stand-in for mamba_ssm: what the mixers of hybrid models call in training, in torch."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Of groups of channels."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups * scale).flatten(-2) * self.weight


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, A: Tensor,
    D: Tensor, chunk_size: int, activation: str, headdim: int, ngroups: int, **_: Any,
) -> Tensor:  # fmt: skip
    """[batch, length, z x B C dt] -> [batch, length, heads * headdim], token after token."""
    heads, inner = len(A), len(A) * headdim
    states = (len(conv1d_weight) - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, len(conv1d_weight), heads], dim=-1)
    width = conv1d_weight.shape[1]
    padded = F.pad(xbc.transpose(1, 2), (width - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=len(conv1d_weight)))
    x, b, c = xbc.transpose(1, 2).split([inner, *[ngroups * states] * 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        part.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, 2)
        for part in (b, c)
    )
    dt = F.softplus(dt + dt_bias)
    state, made = x.new_zeros(len(x), heads, headdim, states), []
    for n in range(x.shape[1]):
        decay = torch.exp(dt[:, n] * A)[..., None, None]
        state = state * decay + (dt[:, n, :, None] * x[:, n])[..., None] * b[:, n, :, None]
        made.append((state * c[:, n, :, None]).sum(-1) + D[:, None] * x[:, n])
    return torch.stack(made, 1).flatten(2) * F.silu(z)


def rearrange(x: Tensor, pattern: str) -> Tensor:
    """einops' for another order of axes, without those of size 1."""
    before, after = (side.split() for side in pattern.split("->"))
    x = x.squeeze([n for n, name in enumerate(before) if name == "1"])
    named = [name for name in before if name != "1"]
    return x.permute([named.index(name) for name in after])


def install(*modules: Any) -> None:
    """Be mamba_ssm and, where it is not there, einops, for these modules, which come anew."""
    names = {
        "layernorm_gated": {"RMSNorm": RMSNorm},
        "ssd_combined": {
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
            "mamba_chunk_scan_combined": None,
        },
        "selective_state_update": {"selective_state_update": None},
    }
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    for name, members in names.items():
        module = types.ModuleType(f"mamba_ssm.ops.triton.{name}")
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].__dict__.update(rearrange=rearrange, repeat=None)
    for module in modules:
        importlib.reload(module)
