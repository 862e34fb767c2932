"""What is wrong with an experiment or a launch."""

from __future__ import annotations

from collections.abc import Iterable

from flux_megatron.errors import BadInput

Rule = tuple[str, str]  # a dotted key, and what is wrong with it


class ExperimentError(BadInput):
    """An experiment that cannot be run, with all that is wrong with it, a line each."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.rules = tuple(dict.fromkeys(rules))
        super().__init__("\n".join(": ".join(filter(None, (name, *one))) for one in self.rules))


class LaunchError(BadInput):
    """Why an experiment cannot be launched so, or here."""
