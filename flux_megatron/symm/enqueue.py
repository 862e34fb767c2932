"""Lists of driver calls, prepared once and run by one call of C (`enqueue.c`).

All that a call enqueues is the same each time but for the registers of its list: the caller's
stream, the epoch, the addresses of operands, and a table of what a channel's region consists of. An
`Operand` names a register. The C compiler is the one that Triton needs for its launchers, and
Triton's cache keeps what it makes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

RECORD, FOLLOW, COPY, COPY_ROWS, WRITE, WAIT, BATCH = range(7)  # as in enqueue.c
DRIVER = "libcuda.so.1"


class Operand(NamedTuple):
    """`add` more than what a register holds when the list runs; register 0 holds 0."""

    register: int
    add: int = 0

    def plus(self, more: int) -> Operand:
        return Operand(self.register, self.add + more)


def always(value: int) -> Operand:
    return Operand(0, value)


NOTHING = always(0)
STREAM = Operand(1)  # the caller's
EPOCHS = Operand(2), Operand(3)  # of the call, in each of its channels
X, W, BIAS = Operand(4), Operand(5), Operand(6)
MADE = 7  # the first register of what a call makes
TABLE = 16  # the first of the table


class Operation(NamedTuple):
    """A driver call but a launch. A BATCH stands before the `size` operations that it makes one
    call of; COPY_ROWS before one of the same kind that has the number of rows and their pitch.
    """

    kind: int
    stream: Operand
    a: Operand = NOTHING  # the event; the address that is written, or awaited
    b: Operand = NOTHING  # the source of a copy; the word
    c: Operand = NOTHING  # the size of a copy, or of each row
    size: int = 0


class Streams(NamedTuple):
    """The copy engine's stream, and the event that orders it and the caller's."""

    own: Operand
    event: Operand

    def operations(self, method: str, given: tuple[Operand, ...]) -> list[Operation]:
        """What a method of the copy engine enqueues; nothing may stand between two of them."""
        own, event = self
        if method in ("fork", "join"):
            later, earlier = (own, STREAM) if method == "fork" else (STREAM, own)
            return [Operation(RECORD, earlier, event), Operation(FOLLOW, later, event)]
        if method == "copy_rows":
            first = Operation(COPY_ROWS, own, *given[:3], size=1)
            return [first, Operation(COPY_ROWS, own, *given[3:])]
        kind = {"copy": COPY, "copy_here": COPY, "wait_count": WAIT}.get(method, WRITE)
        return [Operation(kind, STREAM if method == "copy_here" else own, *given)]


def batched(operations: list[Operation]) -> Iterator[Operation]:
    """The same, each run of signals and waits in one call to the driver."""
    run: list[Operation] = []
    for one in (*operations, None):
        if one is not None and one.kind in (WRITE, WAIT) and len(run) < MOST_IN_BATCH:
            run.append(one)
            continue
        if len(run) > 1:
            yield Operation(BATCH, run[0].stream, size=len(run))
        yield from run
        run = []
        if one is not None:
            yield one


MOST_IN_BATCH = 64


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
