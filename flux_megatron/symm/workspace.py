"""What one group shares: channels of symmetric memory, the agreement of its ranks, the log of their
calls.

A workspace makes a channel when a call first names it. After a failure in the middle of a call, or
a wait that ran out of time, it refuses all further calls and reports the reason to the other ranks.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

from flux_megatron import errors, settings
from flux_megatron.symm import doorbell
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.call_log import QUESTION, CallLog, call_log, different_calls
from flux_megatron.symm.channel import REFRESH_EVERY, Call, Channel
from flux_megatron.symm.device import active, capturing, copy_engine, missing
from flux_megatron.symm.groups import is_listed
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.lru_cache import LRUCache
from flux_megatron.symm.places import Missing, places, why_unavailable
from flux_megatron.symm.status import Status

# Of calls that are remembered: some 400 numbers of rows of a model's eight kinds of layers. Each
# takes 13 KiB of the host (CPU, 2026-11-30, in no row).
SHAPES = 4096


class Workspace:
    """What one group shares: `channels` by name, the agreement, the log of calls, the record of
    late waits, which end after `limit_s` at most; and the device's copy engine. Collective
    constructor.
    """

    alone = False  # whether calls send nothing and wait for nobody: they take their memory

    @lasting()
    def __init__(
        self, group: ProcessGroup, device: torch.device, limit_s: float = math.inf
    ) -> None:
        self.group, self.device = group, device
        self.listed = is_listed(group)  # by torch, until it is destroyed
        # what callers give, for the group inside
        self.given: Callable[[], ProcessGroup | None] = weakref.ref(group)
        self.rank, self.world_size = group.rank(), group.size()
        self.engine = copy_engine(device)
        self.agreement = Agreement(group, partial(self.note, QUESTION))
        self.log: CallLog | None = None
        # what all ranks have agreed on: plan tables of layer kinds, strategies of other calls
        self.agreed: dict[Hashable, Any] = {}
        # decisions, by all that a rank checks of a call
        self.kinds: LRUCache[Hashable, Any] = LRUCache(SHAPES)  # of calls, of `dispatch`
        self.checked: LRUCache[Hashable, Any] = LRUCache(SHAPES)
        self.programs: LRUCache[Hashable, Any] = LRUCache(SHAPES)  # of `overlap.calls`
        self.stage: Any = None  # of `signalled` (`overlap.stage`); it is `open` while a call is
        self.settings: settings.Settings | None = None  # under which `checked` is valid
        ranks = places(group, device, doorbell.address(_compare))
        self._doorbells = [place.doorbell for place in ranks]
        apart = why_unavailable(ranks, group)
        self.missing = Missing(apart) if apart else missing(group, device)
        self.log = call_log(group, device) if self.shares_memory else None
        self.failed_alone = False  # unless the other ranks have failed too: the next call asks
        self.half_made = False  # whether the others may be in a collective of the group then
        self._late = ""  # the wait that ran out of time, with its likely reason
        self._status = Status(device, limit_s)
        self.channels: dict[str, Channel] = {}

    @property
    def unavailable(self) -> str | None:
        """Why kernels reach no memory of other ranks, or None."""
        return None if self.missing is None else self.missing.reason

    @property
    def mailboxes(self) -> bool:
        """Whether copy engines alone reach other ranks, by `symm.mailbox`."""
        return self.missing is not None and self.missing.mailboxes

    @property
    def shares_memory(self) -> bool:
        return self.missing is None or self.missing.mailboxes

    @property
    def timeout_ns(self) -> int:
        """The bound of a kernel's waits."""
        return self._status.bound_ns(self.group)

    def begin(self, channel: str, size_bytes: int, kind: type[Channel] = Channel) -> Call:
        """Open the next call of a channel, of this `kind`, with `size_bytes` or more in its region.

        A missing channel is made, and one that is too small grows: collective, and a
        `WorkspaceError` in a capture.
        """
        self.check()
        captured = capturing(self.device)
        found = self.channels.get(channel)
        if found is not None and found.open:
            raise errors.WorkspaceError(f"a {channel} was begun while another was open")
        if found is None or size_bytes > found.room(captured):
            found = self._enlarged(channel, size_bytes, captured, kind)
        if not captured and (found.epoch + 1) % REFRESH_EVERY == 0:
            self._barrier(f"{channel} is refreshed")  # all signals of the calls so far have come
            found.refresh()
            self._barrier(f"{channel} goes on")  # none of the next call comes before
        return found.begin(captured)

    def end(self, call: Call) -> None:
        """Close the call: all that reads its region has been enqueued on the current stream."""
        call.channel.end(call)
        if self.device.type == "cpu":  # kernels have returned: a late wait is known
            self.check()

    @lasting()
    def _enlarged(
        self, channel: str, size_bytes: int, captured: bool, kind: type[Channel]
    ) -> Channel:
        if captured:
            held = self.channels[channel].room(True) if channel in self.channels else 0
            raise errors.WorkspaceError(
                f"a captured call needs {size_bytes} bytes of symmetric memory, {held} are there, "
                "and a capture cannot allocate: make the same call once before it is "
                "captured"
            )
        self._barrier(f"{channel} grows to {size_bytes} bytes")  # no rank uses the old memory now
        if channel not in self.channels:
            made = kind(self.group, self.device, self._status, self.mailboxes)
            self.channels[channel] = made
        self.channels[channel].grow(size_bytes)
        return self.channels[channel]

    def _barrier(self, reason: str) -> None:
        """Wait until all ranks have finished what they have enqueued. `ProblemMismatch` on every
        rank if one of them makes another call.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.check()  # the others may be gone
        self.agreement.confirm(reason)

    def note_agreed(self, description: str) -> None:
        """`note` a call of a kind that the ranks confirm once."""
        if description not in self.agreed:
            self.agreement.confirm(description)
            self.agreed[description] = True
        self.note(description)

    def note(self, description: str) -> None:
        """Record a call; `ProblemMismatch` if a rank is seen to make another one."""
        if self.failed_alone:
            self.failed_alone = False
            try:
                self.agreement.confirm("a call after one that has failed")
            except errors.ProblemMismatch as error:  # the others may wait for good
                self._report_failure(f"{type(error).__name__}: {error}", self.half_made)
                raise
        if self.log is None:
            return
        try:
            self.log.note(description)
        except errors.ProblemMismatch as error:
            self.ask()  # the other rank may have failed
            self.agreement.stop_askers(str(error))
            doorbell.ring(self._doorbells)  # another rank may wait for this one
            raise errors.ProblemMismatch(self._with_reason(str(error))) from None

    def check(self) -> None:
        """Raise the error that has made results of this group worthless, if there is one."""
        if self._late:
            raise errors.SignalTimeout(self._late)
        if self._status.tripped and self.shares_memory:
            self._explain_end_of_waits()
        if self.agreement.broken:
            raise errors.GroupBroken(self.agreement.broken)

    def _explain_end_of_waits(self) -> None:
        """Raise what has ended the waits of the group, as its record says."""
        if late := self._status.late():
            self.end_late(late)
        if refused := self._status.refused():
            raise errors.CapacityExceeded(refused)
        if mismatch := self._status.mismatch:
            raise errors.ProblemMismatch(self._with_reason(mismatch))

    def end_late(self, waited: str, *, half_made: bool = False) -> NoReturn:
        """A wait of this rank has run out of time; `half_made`: in a collective of the group."""
        self._late = self._with_reason(waited)
        self._report_failure(f"SignalTimeout: {self._late}", half_made)
        raise errors.SignalTimeout(self._late)

    def compare(self) -> None:
        """End this rank's waits if it is known by now that a rank makes another call."""
        if self.log is not None and (difference := self.log.difference()):
            self._status.end_waits(different_calls(difference))

    def ask(self) -> None:
        """Raise `GroupBroken` if another rank has reported that it failed."""
        self.agreement.failure()
        self.check()

    def holders(self) -> list[Any]:
        """Who holds memory, and may be open: the channels, and the stage of `signalled`."""
        return [*self.channels.values(), *([self.stage] if self.stage else [])]

    def open_calls(self) -> list[Any]:
        return [one for one in self.holders() if one.open]

    def guard(self, *, whole: bool = False) -> Guard:
        return Guard(self, whole)

    def fail(self, error: BaseException, is_open: bool, half_made: bool) -> None:
        """`error` has ended a call. In the middle of one other ranks wait for the rest of it. Else
        none waits if all fail alike, as ranks that lack memory do, so they ask each other before
        the next call: one that has failed alone would send its next rows to those who wait for
        these, or who wait for good, where the call is `half_made` of the group's collectives.
        """
        if is_open:
            self.break_off(error)
        elif not isinstance(error, errors.FluxError):
            self.failed_alone, self.half_made = True, half_made

    def break_off(self, error: BaseException) -> None:
        """Refuse all further calls, on all ranks: `error` has ended one in the middle."""
        with contextlib.suppress(RuntimeError), active(self.device):  # which may have failed
            self.engine.join()  # no push reads memory that the caller frees
            if self.stage and self.stage.open:
                self.stage.join()  # nor does a collective beside the caller's stream
        if not self.agreement.broken and not self._status.mismatch:  # which every rank finds
            half_made = bool(self.stage and self.stage.open and self.stage.on_group)
            self._report_failure(f"{type(error).__name__}: {error}", half_made)

    def _report_failure(self, failure: str, half_made: bool) -> None:
        self.agreement.break_off(failure, half_made)
        if self.log is not None:
            self.log.break_off()  # last: who finds this entry asks for the failure

    def _with_reason(self, failure: str) -> str:
        """And the likely reason for a signal that did not come."""
        difference = self.log.difference() if self.log is not None else ""
        reason = self.agreement.failure() or self.agreement.published() or difference
        return failure if reason in failure else f"{failure} ({reason})"

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises: what is open then never ends."""
        return bool(self._late or self.agreement.broken or self._status.tripped)

    def close(self) -> None:
        """Give back all memory. Nothing of a call is enqueued any more."""
        for one in self.holders():
            one.close()
        self.stage = None
        for known in (self.channels, self.agreed, self.kinds, self.checked, self.programs):
            known.clear()

    @property
    def size_bytes(self) -> int:
        """Symmetric memory held by this rank, in bytes."""
        return sum(channel.size_bytes for channel in self.channels.values())


class Guard:
    """`with space.guard(): ...` makes the workspace's device the current one, and breaks the group
    off if an error leaves a call open that began inside. If a `whole` call is inside, and the error
    is this rank's own, the ranks ask each other before the next one (`failed_alone`).

    Its pushes would stay in flight, and the other ranks would wait for the rest of the call.
    """

    def __init__(self, space: Workspace, whole: bool) -> None:
        self._space, self._whole = space, whole

    def __enter__(self) -> None:
        self._active = active(self._space.device)
        self._active.__enter__()
        self._open = self._space.open_calls()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                is_open = self._space.open_calls() != self._open
                if is_open or self._whole:
                    self._space.fail(error, is_open, half_made=True)  # it may have collectives
        finally:
            self._active.__exit__(None, None, None)


of_groups: dict[ProcessGroup, Workspace] = {}  # `symm.workspaces` fills it


def _compare() -> None:
    """Somebody has rung: some call of some group may be one that this rank waits in."""
    for space in [*of_groups.values()]:
        space.compare()
