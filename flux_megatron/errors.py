"""One exception type per thing a user can do about it."""

from __future__ import annotations


class FluxError(Exception):
    """Base of every error this package raises on purpose, `ValueError`s for bad arguments aside.

    A command ends with the message as its only line, and with `exit_status`: 2 for what it was
    given, 1 for a run that failed.
    """

    exit_status = 2


class BadInput(FluxError, ValueError):
    """A command cannot work with what it was given.

    The message is one line: the file or option, the value given, what is expected, the remedy.
    """


class RunFailed(FluxError):
    """A run has begun and failed."""

    exit_status = 1


class ProblemMismatch(FluxError, ValueError):
    """The ranks of a group did not call the same operation with the same problem.

    Fix the caller.
    """


class CapacityExceeded(FluxError, ValueError):
    """Rows for a rank's experts are more than the call has room for, or are not those that it was
    given. The message names both numbers. Give a larger capacity, or route fewer tokens there.
    """


class SignalTimeout(RunFailed, TimeoutError):
    """A signal of another rank did not arrive in time. Look at that rank; then restart all."""


class GroupBroken(RunFailed):
    """A rank failed in the middle of a call, so its group's buffers are undefined. The message has
    the first error of all ranks: fix that; then restart all, or call `release()` on all.
    """


class FallbackRefused(RunFailed):
    """Strict mode: a call would have run without overlap. Fix the reason or leave strict mode."""


class WorkspaceError(RunFailed):
    """Symmetric memory could not be allocated, or calls used it out of order."""
