"""Which arm of `--flux-compare` this process is in: our code, or megatron-core's in our layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_stock = False


def stock_now() -> bool:
    return _stock


@contextlib.contextmanager
def use(stock: bool) -> Iterator[None]:
    """The arm of whole iterations: a backward belongs to the arm that its forward was in."""
    global _stock
    before, _stock = _stock, stock
    try:
        yield
    finally:
        _stock = before
