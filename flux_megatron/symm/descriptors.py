"""File descriptors among the ranks of a group on one node. A number means nothing in another
process: the kernel hands the file itself over, through a socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Sequence

_WORD_BYTES = 256


class Letterbox:
    """Where the other ranks put a descriptor for this one. `address` is for them to know, before
    they post; `close` it.
    """

    def __init__(self) -> None:
        # a name of no file: nothing is left behind. Whoever sees the name does not know the secret
        name, secret = uuid.uuid4().hex, uuid.uuid4().hex
        self.address = (f"\0flux_megatron-{name}", secret)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address[0])
        self._socket.listen()  # more than there are ranks: nobody who posts waits for this one

    def close(self) -> None:
        self._socket.close()

    def exchange(
        self, mine: int, addresses: Sequence[tuple[str, str]], rank: int, timeout_s: float
    ) -> list[int]:
        """The descriptor of every rank, by its number, for the caller to close; `mine` at this
        rank's. `OSError` if not all have come in time.
        """
        got = {rank: mine}
        deadline = time.monotonic() + timeout_s
        try:
            for other, (name, secret) in enumerate(addresses):
                if other != rank:
                    _post(name, f"{rank}/{secret}", mine, _left_s(deadline))
            while missing := [r for r in range(len(addresses)) if r not in got]:
                try:
                    sender, descriptor = self._received(deadline)
                except TimeoutError:
                    named = ", ".join(map(str, missing))
                    raise TimeoutError(
                        f"no memory of rank {named} came within {timeout_s:g} s"
                    ) from None
                if sender in missing:
                    got[sender] = descriptor
                else:
                    os.close(descriptor)
        except OSError:
            for other, descriptor in got.items():
                if other != rank:
                    os.close(descriptor)
            raise
        return [got[r] for r in range(len(addresses))]

    def _received(self, deadline: float) -> tuple[int, int]:
        """The next that comes with this box's secret: from which rank, and the descriptor."""
        while True:
            self._socket.settimeout(_left_s(deadline))
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(_left_s(deadline))
                word, given, *_ = socket.recv_fds(
                    connection, _WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            sender, _, secret = word.decode(errors="replace").partition("/")
            if given and secret == self.address[1]:
                return int(sender), given[0]
            for descriptor in given:
                os.close(descriptor)


def _post(name: str, word: str, descriptor: int, timeout_s: float) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as out:
        out.settimeout(timeout_s)
        out.connect(name)
        socket.send_fds(out, [word.encode()], [descriptor])


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)  # 0 would mean not to wait at all
