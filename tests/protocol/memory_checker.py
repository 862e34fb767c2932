"""A wrong address in an interpreted kernel becomes an exception that names the nearest argument.

The interpreter checks nothing: a wrong address is silent corruption or a dead process. A launch may
touch its tensor arguments (as far as the view reaches, not the whole storage) and the regions that
its pointer tables point into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from interpreted_access import before_each_access
from torch import Tensor
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel touched memory that none of its arguments owns."""


class Region(NamedTuple):
    first: int
    end: int
    name: str


def extent(tensor: Tensor, name: str) -> Region:
    """The bytes from the first to the last element of a view."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return Region(tensor.data_ptr(), tensor.data_ptr() + size_bytes, name)


class AddressChecker:
    """What one launch may touch. `reachable`: memory of others that an int64 argument may hold."""

    def __init__(self, arguments: dict[str, object], reachable: Sequence[Region] = ()) -> None:
        tensors = {name: a for name, a in arguments.items() if isinstance(a, Tensor)}
        self._kept_alive = tensors  # an address in use must not be given to another tensor
        regions = [extent(tensor, f"argument {name}") for name, tensor in tensors.items()]
        for name, tensor in tensors.items():
            addresses = tensor.flatten().tolist() if tensor.dtype == torch.int64 else []
            regions += [
                Region(address, region.end, f"{region.name} (argument {name}[{index}])")
                for index, address in enumerate(addresses)
                for region in reachable
                if region.first <= address < region.end
            ]
        self._regions = sorted(regions)

    def check(self, kind: str, pointers, mask) -> None:
        """Raise `OutOfBounds` unless every unmasked element lies in a region."""
        addresses = pointers.data
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        self.check_addresses(kind, addresses, pointers.get_element_ty().primitive_bitwidth // 8)

    def check_addresses(self, kind: str, addresses: np.ndarray, size_bytes: int) -> None:
        """The same for addresses that are not Triton's: uint64, of any shape."""
        if not addresses.size:
            return
        lowest, highest = int(addresses.min()), int(addresses.max()) + size_bytes
        if any(first <= lowest and highest <= end for first, end, _ in self._regions):
            return  # as nearly always: all in one region
        unowned = np.ones(addresses.shape, dtype=bool)
        for first, end, _ in self._regions:
            unowned &= (addresses < first) | (addresses + np.uint64(size_bytes) > end)
        if unowned.any():
            raise OutOfBounds(self._describe(kind, size_bytes, int(addresses[unowned].flat[0])))

    def _describe(self, kind: str, size_bytes: int, address: int) -> str:
        cta = interpreter.interpreter_builder.grid_idx
        below = [region for region in self._regions if region.first <= address]
        where = "below every argument"
        if below:
            nearest = max(below, key=lambda region: region.end)
            where = f"{address - nearest.end} bytes past the end of {nearest.name}"
        return f"{kind} of {size_bytes} bytes {where}, by CTA {cta}"


@contextmanager
def checked_launches() -> Iterator[None]:
    """Check every access of kernels launched within; for tests that launch one kernel at a time."""
    executor = interpreter.GridExecutor
    original = executor._init_args_hst
    checkers: list[AddressChecker] = []

    def init_arguments(self, positional, named):
        arguments = {**dict(zip(self.arg_names, positional, strict=False)), **named}
        checkers[:] = [AddressChecker(arguments)]
        return original(self, positional, named)

    def check(kind, pointers, mask):
        checkers[0].check(kind, pointers, mask)

    executor._init_args_hst = init_arguments
    try:
        with before_each_access(check):
            yield
    finally:
        executor._init_args_hst = original
