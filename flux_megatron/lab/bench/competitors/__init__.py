"""Other libraries that overlap the same operations.

All are optional. The rows of one that is not installed say so. `build`, which is collective, gives
the calls of its candidates, which `suites.PEERS` has.
"""

from __future__ import annotations

from flux_megatron.lab.bench.competitors.async_tp import AsyncTp
from flux_megatron.lab.bench.competitors.quack import Quack
from flux_megatron.lab.bench.competitors.transformer_engine import TransformerEngine

Competitor = AsyncTp | TransformerEngine | Quack


def all_competitors() -> list[Competitor]:
    return [AsyncTp(), TransformerEngine(), Quack()]
