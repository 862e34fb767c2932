"""Lists of driver calls, prepared once and run by one call of C (`enqueue.c`).

All that one call of a steady shape enqueues is the same each time but for a few words: the caller's
stream, the addresses of operands, the epoch. A `Word` names such a word by its register, so a list
is run with the words alone. The C compiler is the one that Triton needs for its launchers, and
Triton's cache keeps what it makes.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

RECORD, FOLLOW, COPY, COPY_ROWS, WRITE, WAIT, BATCH = range(7)  # as in enqueue.c
DRIVER = "libcuda.so.1"


class Word(NamedTuple):
    """`add` more than what a register holds when the list runs; register 0 holds 0."""

    register: int
    add: int = 0

    def plus(self, more: int) -> Word:
        return Word(self.register, self.add + more)


def always(value: int) -> Word:
    return Word(0, value)


NOTHING = always(0)
STREAM = Word(1)  # the caller's, in every list


class Operation(NamedTuple):
    """A driver call but a launch. A BATCH stands before the `size` operations that it makes one
    call of; COPY_ROWS before one of the same kind that has the number of rows and their pitch.
    """

    kind: int
    stream: Word
    a: Word = NOTHING  # the event; the address that is written, or awaited
    b: Word = NOTHING  # the source of a copy; the word
    c: Word = NOTHING  # the size of a copy, or of each row
    size: int = 0


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


def listed(operations: list[Operation], device: int) -> Any:
    """A list of operations on streams of a device, by its number; its `run(stream, ...)` takes the
    registers from 1 on. Any thread may run it.
    """
    made = native().List(device)
    for one in operations:
        made.add(one.kind, one.size, one.stream, one.a, one.b, one.c)
    return made
