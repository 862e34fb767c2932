"""One exception type per thing a user can do about it."""

from __future__ import annotations


class FluxError(Exception):
    """Base of every error this package raises on purpose, `ValueError`s for bad arguments aside."""


class ProblemMismatch(FluxError, ValueError):
    """The ranks of a group did not call the same operation with the same problem.

    Fix the caller.
    """


class CapacityExceeded(FluxError, ValueError):
    """Rows for a rank's experts are more than the call has room for, or are not those that it was
    given. The message names both numbers. Give a larger capacity, or route fewer tokens there.
    """


class SignalTimeout(FluxError, TimeoutError):
    """A signal of another rank did not arrive in time. Look at that rank; then restart all."""


class GroupBroken(FluxError):
    """A rank failed in the middle of a call, so its group's buffers are undefined. The message has
    the first error of all ranks: fix that; then restart all.
    """


class RankLost(FluxError):
    """A collective of the run ended without a rank, which the message names. Look at that rank;
    then restart all.
    """


class FallbackRefused(FluxError):
    """Strict mode: a call would have run without overlap. Fix the reason or leave strict mode."""


class WorkspaceError(FluxError):
    """Symmetric memory could not be allocated, or calls used it out of order."""
