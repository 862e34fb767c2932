"""What interpreted kernels do to memory: a hook before every load, store and atomic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import triton
from triton.runtime import interpreter

needs_interpreter = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="kernels are compiled in this process: set TRITON_INTERPRET=1 to interpret them",
)

# builder method -> (kind, position of the pointers, position of the mask or None)
OPERATIONS: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3),
    "create_atomic_cas": ("atomic", 0, None),
}


@contextmanager
def before_each_access(hook: Callable) -> Iterator[None]:
    """Call `hook(kind, pointers, mask)`, with Triton's handles, before each access."""
    builder = interpreter.InterpreterBuilder
    originals = {name: getattr(builder, name) for name in OPERATIONS}

    def hooked(original: Callable, kind: str, at: int, mask_at: int | None) -> Callable:
        def access(self, *operands, **options):
            hook(kind, operands[at], None if mask_at is None else operands[mask_at])
            return original(self, *operands, **options)

        return access

    for name, (kind, at, mask_at) in OPERATIONS.items():
        setattr(builder, name, hooked(originals[name], kind, at, mask_at))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(builder, name, original)
