"""Other libraries that overlap the same operations.

All are optional. The rows of one that is not installed say so.
"""

from __future__ import annotations

from typing import Protocol

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.competitors.async_tp import AsyncTp
from flux_megatron.lab.bench.competitors.quack import Quack
from flux_megatron.lab.bench.competitors.transformer_engine import TransformerEngine
from flux_megatron.lab.bench.forward import Forward


class Competitor(Protocol):
    """Another library. `build` gives the calls of its candidates, which `suites.PEERS` has, and is
    collective.
    """

    name: str

    def unavailable(self) -> str | None: ...

    def build(self, experiment: Forward | Backward) -> dict[str, Call]: ...


def all_competitors() -> list[Competitor]:
    return [AsyncTp(), TransformerEngine(), Quack()]
