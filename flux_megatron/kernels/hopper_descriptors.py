"""Host descriptors of matrices for TMA, made once for each address, shape and block."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    elements = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(block), elements[dtype])


class _Address(NamedTuple):
    """What a descriptor needs of a tensor: kept in its place, it keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=4096)  # making one costs the host 10 us
def _descriptor(base: _Address, shape: torch.Size, block: tuple[int, ...]):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, columns = shape
    layout = _layout(block, base.dtype)
    return TensorDescriptor(base, [rows, columns], _list(columns, 1), _list(*block), layout)


@lru_cache(maxsize=1024)
def _list(*sizes: int) -> list[int]:
    """One for all descriptors: with another M in each call they are many."""
    return [*sizes]


def described(tensor: Tensor, *block: int):
    """A descriptor of a contiguous matrix, for TMA of blocks."""
    return _descriptor(_Address(tensor.data_ptr(), tensor.dtype), tensor.shape, block)


def described_w(w: Tensor, layout: str, block_k: int, columns: int):
    """Of w, [N, K] or [K, N], for blocks of so many columns of the product."""
    if layout == "nt":
        return described(w, columns, block_k)
    return described(w, block_k, columns)
