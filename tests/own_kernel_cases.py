"""Operands for which RMSNorm is exact in every dtype, and where scripts/own_kernel.py is."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SCRIPTS = Path(__file__).parents[1] / "scripts"
EPS = 0.75


def exact_shard(call: int, rank: int, M_shard: int, N: int, dtype: torch.dtype) -> Tensor:
    """Rows of two kinds: a quarter of 1 and the rest 0, or a quarter of 1 and the rest 2, with any
    signs. The mean of their squares, plus EPS, is 1 or 4.
    """
    assert N % 4 == 0, "a quarter of the elements"
    made = torch.Generator().manual_seed(1000 * call + rank)
    ones = torch.rand(M_shard, N, generator=made).argsort(1) < N // 4
    rest = 2.0 * torch.randint(2, (M_shard, 1), generator=made)
    signs = 2.0 * torch.randint(2, (M_shard, N), generator=made) - 1
    return (torch.where(ones, 1.0, rest) * signs).to(dtype)


def exact_weight(N: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(N) % 5 - 2).to(dtype)


def expected(shards: list[Tensor], weight: Tensor, eps: float) -> Tensor:
    """In fp64, rounded once."""
    x = torch.cat(shards).double()
    return F.rms_norm(x, (x.shape[1],), weight.double(), eps).to(weight.dtype)
