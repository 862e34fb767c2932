"""Did all ranks make the same call, every time? A ring of each rank's last calls in shared memory.

`Agreement` asks once for each new kind of call. Another rank can still make known calls in another
order. So each rank writes a digest of its call and reads what the others have written so far. No
rank waits. The later of two different calls raises before it touches a buffer. The hosts write and
read, on CUDA too.
"""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import cpu_backend
from flux_megatron.symm.lru_cache import LRUCache

ENTRIES = 4096  # how far one host may run ahead of another and still be compared
_DIGEST_BITS = 32
_NUMBERS = 2**31  # numbers of calls wrap around there, so an entry is never negative
QUESTION = "one that is new to it"  # entered by a rank that asks the others about a call
_BROKEN_OFF = "one that was never made, because the call before it failed"


class CallLog:
    """The calls of one group on one node. Collective constructor."""

    def __init__(self, group: ProcessGroup) -> None:
        self._rank = group.rank()
        self._memory = cpu_backend.allocate(ENTRIES * 8, group)
        entries = ctypes.c_int64 * ENTRIES
        self._rings = [entries.from_address(p) for p in self._memory.pointers.tolist()]
        self._others = [(r, ring) for r, ring in enumerate(self._rings) if r != self._rank]
        self._digests: LRUCache[str, int] = LRUCache(ENTRIES)
        self._count = 0
        self._compared = [0] * group.size()

    def note(self, description: str) -> None:
        """Record this rank's next call; `ProblemMismatch` if a rank is known to differ."""
        self._write(description)
        if difference := self.difference():
            raise errors.ProblemMismatch(different_calls(difference))

    def break_off(self) -> None:
        """Write an entry that no call has: every other rank finds a difference at its next call."""
        self._write(_BROKEN_OFF)

    def _write(self, description: str) -> None:
        if description not in self._digests:
            self._digests[description] = zlib.crc32(description.encode())
        digest = self._digests[description]
        number = self._count + 1
        # one aligned store holds number and digest: a reader sees both or neither
        self._rings[self._rank][number % ENTRIES] = number % _NUMBERS << _DIGEST_BITS | digest
        # last: the doorbell's thread would take an entry that is not there yet for one of a call
        # that it need not compare
        self._count = number

    def difference(self) -> str:
        """The first call that some rank made differently, as far as they have come, or nothing."""
        count, compared, ours = self._count, self._compared, self._rings[self._rank]
        for rank, ring in self._others:
            for number in range(compared[rank] + 1, count + 1):
                theirs, mine = ring[number % ENTRIES], ours[number % ENTRIES]
                if theirs == mine:
                    compared[rank] = number
                    continue
                if 0 < (number - (theirs >> _DIGEST_BITS)) % _NUMBERS < _NUMBERS // 2:
                    break  # not there yet: the entry is of an earlier call
                if theirs >> _DIGEST_BITS == mine >> _DIGEST_BITS:
                    return (
                        f"call {number} of rank {self._rank} is {self._describe(mine)}, "
                        f"of rank {rank} {self._describe(theirs)}"
                    )
                compared[rank] = number
        return ""

    def _describe(self, entry: int) -> str:
        named = {zlib.crc32(text.encode()): text for text in (QUESTION, _BROKEN_OFF)}
        # a copy in one step of C: the doorbell's thread asks while the caller's enters descriptions
        known = named | {digest: text for text, digest in dict.copy(self._digests).items()}
        return known.get(entry & ((1 << _DIGEST_BITS) - 1), "one that this rank has not made")


def different_calls(difference: str) -> str:
    return f"the ranks of the group made different calls: {difference}"


def call_log(group: ProcessGroup, device: torch.device) -> CallLog | None:
    """The log of calls; None for a group on GPUs whose ranks share no host memory."""
    try:
        return CallLog(group)
    except errors.WorkspaceError:
        if device.type == "cpu":
            raise
        return None
