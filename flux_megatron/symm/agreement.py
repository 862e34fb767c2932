"""Do all ranks mean the same call? Asked once for each new problem, through the job's key-value
store.

A collective would hang where one rank does not come. Here every rank publishes its words under the
number of the question and reads the others' with a deadline, so every rank learns who said what, or
who said nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings

_REFUSED = "refused: "
_BROKEN = "broken"  # the key of the first failure in the middle of a call
_ANSWER = "\x1f"  # ASCII's separator of units: between a question and this rank's answer


class Agreement:
    """The questions of one group, numbered. Collective constructor."""

    def __init__(self, group: ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        self._name = group.group_name
        self.broken = ""  # the first failure of a rank in the middle of a call, once it is known
        # a group created later under the same name must not read old answers
        nonce = [uuid.uuid4().hex]
        dist.broadcast_object_list(nonce, group=group, group_src=0)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"flux_megatron/{nonce[0]}", store)
        self._number = 0

    def store(self, name: str) -> dist.Store:
        """A part of the job's key-value store that this group alone uses for `name`."""
        return dist.PrefixStore(name, self._store)

    def confirm(self, words: str) -> None:
        """Return if every rank says `words`; else raise `ProblemMismatch` that quotes every
        rank.
        """
        self.ask(words, "")

    def ask(self, question: str, answer: str) -> list[str]:
        """Every rank's answer to the same question; `ProblemMismatch` on all ranks if one asks
        another, refuses or does not come.
        """
        said = [text.partition(_ANSWER) for text in self._exchange(question + _ANSWER + answer)]
        words = [asked for asked, _, _ in said]
        if any(other.startswith(_REFUSED) for other in words) and self.failure():
            raise errors.GroupBroken(self.broken)
        if any(other != question for other in words):
            quotes = "; ".join(f"rank {r}: {text or 'no answer'}" for r, text in enumerate(words))
            raise errors.ProblemMismatch(
                f"the ranks of the group do not agree on the call: {quotes}"
            )
        return [answered for _, _, answered in said]

    def refuse(self, reason: str) -> None:
        """Tell the others, who may be asking right now, that this rank cannot take part."""
        self._store.set(f"{self._number}/{self._rank}", _REFUSED + reason)
        self._number += 1

    def refusals(self) -> str:
        """What other ranks refused under the current number: the likely reason for a missing
        signal.
        """
        keys = {r: f"{self._number}/{r}" for r in range(self._world_size) if r != self._rank}
        said = {
            r: self._store.get(key).decode() for r, key in keys.items() if self._store.check([key])
        }
        return "; ".join(
            f"rank {r} {text}" for r, text in said.items() if text.startswith(_REFUSED)
        )

    def break_off(self, failure: str) -> None:
        """Tell all ranks that this one failed in the middle of a call, unless one did before."""
        mine = (
            f"group {self._name} cannot be used any more: "
            f"rank {self._rank} failed in the middle of a call: {failure}"
        )
        try:
            self.broken = self._store.compare_set(_BROKEN, "", mine).decode()
            self.refuse(self.broken)  # those who ask now need not wait
        except RuntimeError:  # what failed may be the store
            self.broken = mine

    def failure(self) -> str:
        """The first failure of any rank in the middle of a call, or nothing."""
        with contextlib.suppress(RuntimeError):
            if not self.broken and self._store.check([_BROKEN]):
                self.broken = self._store.get(_BROKEN).decode()
        return self.broken

    def _exchange(self, words: str) -> list[str]:
        number, self._number = self._number, self._number + 1
        self._store.set(f"{number}/{self._rank}", words)
        deadline = time.monotonic() + settings.get().timeout_s
        said = []
        for rank in range(self._world_size):
            key = f"{number}/{rank}"
            remaining_s = max(deadline - time.monotonic(), 0.01)  # a store takes 0 for no limit
            try:
                self._store.wait([key], datetime.timedelta(seconds=remaining_s))
                said.append(self._store.get(key).decode())
            except dist.DistStoreError:
                said.append("")
        return said
