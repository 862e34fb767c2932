"""The arithmetic of `docs/measuring.md`: from the times of one row's candidates to E. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Yardsticks:
    """What every candidate of a row is held against, in microseconds.

    `gemm` is the faster of the library's GEMMs and ours. `serial` is that plus what the collectives
    add when they run one after the other with the library's GEMMs: so a faster GEMM of ours moves
    both, and never widens the distance between them.
    """

    gemm: float
    serial: float

    def efficiency(self, time_us: float) -> float | None:
        """E: 1 where communication is free, 0 where nothing is gained, below 0 where it is slower.

        None where the collectives cost nothing, so that there is nothing to hide.
        """
        exposed = self.serial - self.gemm
        return 1 - (time_us - self.gemm) / exposed if exposed > 0 else None


def yardsticks(medians_us: Mapping[str, float]) -> Yardsticks | None:
    """From the medians by candidate; None without `gemm` or `serial`."""
    if "gemm" not in medians_us or "serial" not in medians_us:
        return None
    gemm = min(medians_us["gemm"], medians_us.get("ours_gemm", medians_us["gemm"]))
    return Yardsticks(gemm, gemm + medians_us["serial"] - medians_us["gemm"])


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the values next to it."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]
