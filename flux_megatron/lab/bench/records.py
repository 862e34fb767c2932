"""What is in the bench's rows, one a case and candidate; and E. No torch.

A row has everything that its time depends on, and neither a host's name nor a path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IN_A_GRAPH = "_graph"  # ends the name of a candidate that is replayed from a CUDA graph
LIBRARY, OURS, COMPETITOR = "library", "ours", "peer"  # roles of candidates, as rows spell them
OK, WRONG, FAILED, UNSUPPORTED, MISSING = "ok", "wrong", "failed", "unsupported", "missing"


@dataclass(frozen=True)
class Provenance:
    """What is the same for all rows of a run but the clocks, taken after a case on rank 0.

    `nvls` says whether NVLink multicast was allowed; `max_connections` is
    CUDA_DEVICE_MAX_CONNECTIONS or "unset".
    """

    run: str
    date: str
    commit: str
    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    nccl: str
    nvls: str
    max_connections: str
    world_size: int
    dtype: str
    scale: int
    clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True)
class Row:
    """One candidate on one case.

    `status` is `ok`, or why there are no times: `wrong` (see `errors` and `allowed`), `failed`,
    `unsupported` (by a strategy of ours) or `missing` (a competitor that is not installed).

    M, N_local and K_local are the GEMM of one rank, as it is after gathering. `times_us` has the
    slowest rank of every round. `host_us` is the host's time for one call.

    `beside`: all its times, those of the baselines too, are of calls beside such collectives of
    another communicator. The `reason` of an `ok` row says in how many rounds those ended before the
    call.
    """

    suite: str
    pattern: str
    op: str
    layout: str
    M: int
    N_local: int
    K_local: int
    candidate: str
    role: str
    status: str
    reason: str
    errors: list[float | None]
    allowed: list[float | None]
    times_us: list[float]
    median_us: float | None
    gemm_us: float | None
    serial_us: float | None
    efficiency: float | None
    host_us: float | None
    plan: dict[str, Any] | None
    beside: bool = False
    collective: str = "all_reduce"


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
