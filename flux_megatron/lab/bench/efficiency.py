"""The arithmetic of CONTRIBUTING.md: from the times of one row's candidates to E. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

IN_A_GRAPH = "_graph"  # ends the name of a candidate that is replayed from a CUDA graph


@dataclass(frozen=True)
class Baselines:
    """The two times that every candidate of a row is compared with, in microseconds.

    `gemm` is the faster of the library's GEMM and ours. `serial` adds the time of the collectives
    that run one after the other with the library's GEMMs. So a faster GEMM of ours moves both
    times, and their distance stays the same.
    """

    gemm: float
    serial: float

    def efficiency(self, time_us: float) -> float | None:
        """E: 1 if all communication is hidden, 0 at the time of `serial`, below 0 if slower.

        None if the collectives cost nothing, so there is nothing to hide.
        """
        exposed = self.serial - self.gemm
        return 1 - (time_us - self.gemm) / exposed if exposed > 0 else None


def baselines(medians_us: Mapping[str, float]) -> Baselines | None:
    """From the medians by candidate; None without `gemm` or `serial`, which counts as a graph where
    it is faster so.
    """
    if "gemm" not in medians_us or "serial" not in medians_us:
        return None
    gemm = min(medians_us["gemm"], medians_us.get("ours_gemm", medians_us["gemm"]))
    serial = min(medians_us["serial"], medians_us.get("serial" + IN_A_GRAPH, math.inf))
    return Baselines(gemm, gemm + serial - medians_us["gemm"])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the values next to it; None of none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]
