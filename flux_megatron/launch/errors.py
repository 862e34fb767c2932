"""What is wrong with an experiment or a launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flux_megatron.errors import BadInput


class ErrorDetail(NamedTuple):
    """`file` is the one that set `key`, or "--set" for an override."""

    file: str
    key: str
    rule: str

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


class ExperimentError(BadInput):
    """An experiment that cannot be run, with all that is wrong with it, a line each.

    `file`, `key` and `rule` are those of the first error.
    """

    def __init__(self, errors: Iterable[ErrorDetail]) -> None:
        self.errors = tuple(dict.fromkeys(errors))
        super().__init__("\n".join(map(str, self.errors)))
        self.file, self.key, self.rule = self.errors[0]


class LaunchError(BadInput):
    """Why an experiment cannot be launched so, or here."""
