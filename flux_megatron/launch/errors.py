"""What is wrong with an experiment or a launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorDetail:
    """`file` is the one that set `key`, or "--set" for an override."""

    file: str
    key: str
    rule: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.key, self.rule)))


class ExperimentError(ValueError):
    """An experiment that cannot be run, with all that is wrong with it, a line each.

    `file`, `key` and `rule` are those of the first error.
    """

    def __init__(self, errors: Iterable[ErrorDetail]) -> None:
        self.errors = tuple(dict.fromkeys(errors))
        super().__init__("\n".join(map(str, self.errors)))
        first = self.errors[0]
        self.file, self.key, self.rule = first.file, first.key, first.rule


class LaunchError(ValueError):
    """Why an experiment cannot be launched so, or here."""
