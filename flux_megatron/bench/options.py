"""The options of a bench run. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from flux_megatron.bench import suites
from flux_megatron.bench.suites import Case


@dataclass(frozen=True)
class Options:
    """What to measure and how. `candidates` () means all; `scale` divides the model's widths.

    `beside` measures every case twice: alone, and beside all-reduces of another communicator.
    `graphs` lets every candidate that communicates run once more, replayed from a CUDA graph.
    """

    suites: tuple[str, ...]
    patterns: tuple[str, ...]
    Ms: tuple[int, ...]
    out: str
    candidates: tuple[str, ...] = ()
    rounds: int = 12
    tp: int = 4
    device: str = "cuda"
    scale: int = 1
    time_limit_s: float | None = None
    nvls: bool = False
    commit: str = ""
    beside: bool = False
    graphs: bool = False

    @property
    def conditions(self) -> tuple[bool, ...]:
        """The values of `Row.beside` in the rows of a case."""
        return (False, True) if self.beside else (False,)

    def cases(self) -> list[Case]:
        """All cases, by suite and M: some competitors are prepared for both together."""
        return [
            case
            for suite in self.suites
            for M in sorted(set(self.Ms), reverse=True)
            for pattern in self.patterns
            for case in suites.cases(suite, pattern, (M,), self.tp, self.scale)
        ]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Options:
        """Lists of JSON become tuples again."""
        values: dict[str, Any] = json.loads(text)
        tuples = {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
        return Options(**values | tuples)
