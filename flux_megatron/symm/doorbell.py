"""How one rank's host tells another's, which waits in a kernel, to look at the log of calls.

A process has a pipe and a thread that sleeps on it, so nothing is paid until somebody rings. The
other ranks of the node open the pipe's end through /proc, as they open each other's shared memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import cache

_RINGS = 4096  # bytes of the pipe that one answer takes


def address(answer: Callable[[], None]) -> str:
    """Where this process is rung, for a thread of it to call `answer`: one for each `answer`."""
    return _address(os.getpid(), answer)


@cache
def _address(process: int, answer: Callable[[], None]) -> str:
    """`process` is part of the key: a fork has its parent's cache, but not its threads."""
    heard, rung = os.pipe()
    threading.Thread(target=_serve, args=(heard, answer), daemon=True).start()
    return f"/proc/{process}/fd/{rung}"


def _serve(heard: int, answer: Callable[[], None]) -> None:
    """For the life of the process: an answer that fails is reported, and the next ring answered."""
    while os.read(heard, _RINGS):
        try:
            answer()
        except Exception as error:  # noqa: PERF203, the thread must go on
            warnings.warn(f"flux_megatron: a doorbell's answer failed: {error!r}", stacklevel=2)


def ring(addresses: Iterable[str]) -> None:
    """Wake the host of each address. One that has ended, or is rung already, is left alone."""
    for address in addresses:
        with contextlib.suppress(OSError):
            descriptor = os.open(address, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"!")
            finally:
                os.close(descriptor)
