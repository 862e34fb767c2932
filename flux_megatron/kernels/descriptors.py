"""Host descriptors of matrices for TMA, made once for each address, shape and block."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels.triton_private import MAP_BYTES, Address
from flux_megatron.symm.steps import Slot


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    elements = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(block), elements[dtype])


@lru_cache(maxsize=64)
def _template(dtype: torch.dtype, block: tuple[int, ...]):
    """A descriptor whose block is checked."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base, layout = Address(0, dtype), _layout(block, dtype)
    return TensorDescriptor(base, [*block], [block[1], 1], [*block], layout)


def example(dtype: torch.dtype, *block: int):
    """One that kernels are compiled for as for any other of such blocks."""
    return _template(dtype, block)


def _descriptor(base: Address, shape: tuple[int, ...], block: tuple[int, ...]):
    """Without the checks of the constructor, which take the host 10 us."""
    template = _template(base.dtype, block)
    made = object.__new__(type(template))
    sizes = {"base": base, "shape": [*shape], "strides": _list(shape[1], 1)}
    made.__dict__ = {**template.__dict__, **sizes}
    return made


@lru_cache(maxsize=1024)
def _list(*sizes: int) -> list[int]:
    """One for all descriptors: with another M in each call they are many."""
    return [*sizes]


@lru_cache(maxsize=4096)
def _known_descriptor(base: Address, shape: torch.Size, block: tuple[int, ...]):
    return _descriptor(base, shape, block)


def descriptor_of(tensor: Tensor, block: tuple[int, ...]):
    """A descriptor of a contiguous matrix, for TMA of blocks."""
    return _known_descriptor(Address(tensor.data_ptr(), tensor.dtype), tensor.shape, block)


class Described(NamedTuple):
    """A descriptor of a slot: of the tensor that a call has there."""

    slot: Slot
    block: tuple[int, ...]

    @property
    def base(self) -> Slot:
        return self.slot

    @property
    def operand(self) -> tuple[int, ...]:
        """As lists have it: that of the slot, and rows and columns."""
        return *self.slot.operand, *self.slot.shape

    @property
    def block_shape(self) -> list[int]:
        return _list(*self.block)

    def of(self, tensor: Tensor):
        return descriptor_of(tensor, self.block)

    def like(self, *shape: int):
        """Of another matrix of its type, at the address that descriptors in lists begin with."""
        return _descriptor(Address(MAP_BYTES, self.slot.dtype), shape, self.block)


def described(tensor: Tensor | Slot, *block: int):
    """A descriptor of a tensor or of a slot."""
    return Described(tensor, block) if isinstance(tensor, Slot) else descriptor_of(tensor, block)


def described_w(w: Tensor | Slot, layout: str, block_k: int, columns: int):
    """Of w, [N, K] or [K, N], for blocks of so many columns of the product."""
    if layout == "nt":
        return described(w, columns, block_k)
    return described(w, block_k, columns)
