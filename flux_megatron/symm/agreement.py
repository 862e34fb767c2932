"""Do all ranks make the same call? The ranks ask once for each new problem, through their key-value
store.

A collective would hang where one rank does not come. Here every rank publishes its question and
answer under the number of the question and reads the others' with a deadline. So every rank learns
what each rank asked, and which rank gave no answer.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.symm import objects
from flux_megatron.symm.groups import is_fake, name_of, store_of, timeout_s

_REFUSED = "refused: "
_BROKEN = "broken"  # the key of the first failure in the middle of a call
_RELEASE = " before all its ranks call release()"
_LOST = ", destroy it and make another"
_ANSWER = "\x1f"  # ASCII's separator of units: between a question and this rank's answer


class Agreement:
    """The questions of one group, numbered. Collective constructor.

    `note` enters a question into the log of calls; `ProblemMismatch` if another rank makes a call.
    """

    def __init__(self, group: ProcessGroup, note: Callable[[], None]) -> None:
        self._rank, self._world_size, self._note = group.rank(), group.size(), note
        self._group, self._name = group, name_of(group)
        self.broken = ""  # the first failure of a rank in the middle of a call, once it is known
        # a group created later under the same name must not read old answers
        nonce = objects.broadcast(uuid.uuid4().hex, group)
        self._store = dist.PrefixStore(f"flux_megatron/{nonce}", store_of(group))
        self._number = 0

    def store(self, name: str) -> dist.Store:
        """A part of the key-value store that this group alone uses for `name`."""
        return dist.PrefixStore(name, self._store)

    def confirm(self, description: str) -> None:
        """Return if every rank describes its call so; else raise `ProblemMismatch` that quotes
        every rank.
        """
        self.ask(description, "")

    def ask(self, question: str, answer: str) -> list[str]:
        """Every rank's answer to the same question; `ProblemMismatch` on all ranks if one asks
        another, refuses or does not come.
        """
        published = self._exchange(question + _ANSWER + answer)
        pairs = [text.partition(_ANSWER)[::2] for text in published]
        questions = [asked for asked, _ in pairs]
        if any(other.startswith(_REFUSED) for other in questions) and self.failure():
            raise errors.GroupBroken(self.broken)
        if any(other != question for other in questions):
            quotes = "; ".join(
                f"rank {r}: {text or 'no answer'}" for r, text in enumerate(questions)
            )
            raise errors.ProblemMismatch(
                f"the ranks of the group do not agree on the call: {quotes}"
            )
        return [answered for _, answered in pairs]

    def refuse(self, reason: str) -> None:
        """Publish, for ranks that ask or wait right now, that this rank cannot take part."""
        self._publish(_REFUSED + reason)
        with contextlib.suppress(errors.ProblemMismatch):  # this rank has an error already
            self._note()
        self._number += 1

    def published(self) -> str:
        """The questions and refusals under the current number: the likely reason for a missing
        signal, because this rank has not come to it.
        """
        found = []
        with contextlib.suppress(RuntimeError):  # what failed may be the store
            for rank in range(self._world_size):
                asked, _, text = self._read(f"asks/{rank}").partition("/")
                if asked != str(self._number):
                    text = self._read(f"{self._number}/{rank}")
                if text := text.partition(_ANSWER)[0]:
                    found.append(
                        f"rank {rank} {text if text.startswith(_REFUSED) else f'asks: {text}'}"
                    )
        return "; ".join(found)

    def stop_askers(self, reason: str) -> None:
        """Answer those who ask this rank, unless it asks them too, that it makes another call."""
        with contextlib.suppress(RuntimeError):
            if not self._store.check([f"{self._number}/{self._rank}"]):
                self._publish(_REFUSED + reason)

    def break_off(self, failure: str, half_made: bool) -> None:
        """Publish that this rank failed in the middle of a call, unless one failed before;
        `half_made`: in one of the group's own collectives, behind which it has no other.
        """
        mine = (
            f"group {self._name} cannot be used any more{_LOST if half_made else _RELEASE}: "
            f"rank {self._rank} failed in the middle of a call: {failure}"
        )
        try:
            self.broken = self._store.compare_set(_BROKEN, "", mine).decode()
            self._publish(_REFUSED + self.broken)  # those who ask now need not wait
        except RuntimeError:  # what failed may be the store
            self.broken = mine

    def failure(self) -> str:
        """The first failure of any rank in the middle of a call, or nothing."""
        with contextlib.suppress(RuntimeError):
            self.broken = self.broken or self._read(_BROKEN)
        return self.broken

    @property
    def lost(self) -> str:
        """The failure, if no memory that is made anew helps the group, or nothing."""
        return self.broken if _LOST in self.failure() else ""

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _publish(self, text: str) -> None:
        self._store.set(f"{self._number}/{self._rank}", text)

    def _exchange(self, text: str) -> list[str]:
        """What every rank has published under the next number, "" for a rank that is late."""
        if is_fake(self._group):
            return [text] * self._world_size
        # for those who find the entry in the log; the answer comes behind the entry, because a rank
        # that finds another call there refuses instead, and nobody may have read its consent
        self._store.set(f"asks/{self._rank}", f"{self._number}/{text}")
        self._note()
        self._publish(text)
        number, self._number = self._number, self._number + 1
        keys = [f"{number}/{rank}" for rank in range(self._world_size)]
        limit_s = timeout_s(self._group)
        try:  # two requests, however many ranks there are: one server answers those of all
            self._store.wait(keys, datetime.timedelta(seconds=limit_s))
            published = [answer.decode() for answer in self._store.multi_get(keys)]
        except RuntimeError:  # a file as store names no other when a wait has run out of time
            published = [self._read(key) for key in keys]
        if not all(published):
            reason = f"no answer of rank {published.index('')} within {limit_s:g} s"
            # a rank that comes now must not go on alone
            self._store.set(keys[self._rank], _REFUSED + reason)
        if number and all(published):  # every rank has read what this one said before
            self._store.delete_key(f"{number - 1}/{self._rank}")
        return published
