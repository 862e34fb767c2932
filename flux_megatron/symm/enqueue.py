"""Lists of driver calls, prepared once and run by one call of C (`enqueue.c`).

All that a call enqueues is the same each time but for the registers of its list: the caller's
stream, the epoch, the addresses of operands, and a table of what a channel's region consists of. An
`Operand` names a register. The C compiler is the one that Triton needs for its launchers, and
Triton's cache keeps what it makes.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

RECORD, FOLLOW, COPY, COPY_ROWS, WRITE, WAIT = range(6)  # as in enqueue.c
DRIVER = "libcuda.so.1"


class Operand(NamedTuple):
    """`add` more than what a register holds when the list runs; register 0 holds 0."""

    register: int
    add: int = 0

    def plus(self, more: int) -> Operand:
        return Operand(self.register, self.add + more)


def always(value: int) -> Operand:
    return Operand(0, value)


STREAM = Operand(1)  # the caller's
EPOCHS = Operand(2), Operand(3)  # of the call, in each of its channels
X, W, BIAS, X_SCALE, W_SCALE = (Operand(register) for register in range(4, 9))
MADE = 9  # the first register of what a call makes: 7 tensors, scratch of kernels included
TABLE = 16  # the first of the table


# A driver call but a launch: its kind, its stream, and its numbers. They are the event; what a
# method of the copy engine takes, which copies; the address that is written or awaited, and the
# word.
Operation = tuple["int | Operand", ...]
_KINDS = {
    "copy": COPY, "copy_here": COPY, "copy_rows": COPY_ROWS, "write": WRITE, "signal": WRITE,
    "wait_count": WAIT,
}  # fmt: skip


class Streams(NamedTuple):
    """The copy engine's stream, and the event that orders it and the caller's."""

    own: Operand
    event: Operand

    def operations(self, method: str, *operands: Operand) -> list[Operation]:
        """What a method of the copy engine enqueues."""
        own, event = self
        if method == "fork":
            return [(RECORD, STREAM, event), (FOLLOW, own, event)]
        if method == "join":
            return [(RECORD, own, event), (FOLLOW, STREAM, event)]
        return [(_KINDS[method], STREAM if method == "copy_here" else own, *operands)]


@cache
def native() -> Any:
    """The module of `enqueue.c`. Raises what the compiler, Triton or the driver's library does."""
    build = importlib.import_module("triton.runtime.build")
    headers = Path(importlib.import_module("triton.backends.nvidia").__file__ or "").parent
    module = build.compile_module_from_src(
        src=Path(__file__).with_suffix(".c").read_text(),
        name="flux_megatron_enqueue",
        include_dirs=[str(headers / "include")],
    )
    module.bind(DRIVER)
    return module


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why C cannot make the driver calls, or None."""
    try:
        native()
    except Exception as error:  # a compiler that is not there, or whatever it raises
        return f"{type(error).__name__}: {error}"
    return None
