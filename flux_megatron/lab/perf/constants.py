"""The few numbers of the cost model that are fitted to measured rows.

`FITTED` was fitted to 4 x H200's operations of 2026-11-21 (TP 4, bf16). No number is fitted to a
published speedup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exposure:
    """The share of its collectives that another library leaves exposed, beyond the cost of one GEMM
    per shard: in AG+GEMM, in GEMM+RS, and in the backward of a column layer, which has one of each.
    """

    gather: float
    scatter: float
    column_backward: float


@dataclass(frozen=True)
class Constants:
    """ "Connections" is CUDA_DEVICE_MAX_CONNECTIONS: "unset", or "1" as Megatron requires before
    Blackwell.

    gemm_rate: share of a GPU's full-wave rate that the main loop of a library's tile reaches
    tile_us: time of a wave of tiles beside its main loop
    accumulate, hidden: adding wgrad to an fp32 gradient costs `accumulate` times the traffic,
        divided by 1 + `hidden` x GEMM time / traffic time
    call_overhead_us: time of a call by a strategy of ours, beside transfers, GEMMs and the sum
    megatron_backward: share of a column layer's two collectives that Megatron's backward leaves
        exposed, by connections
    exposures: of other libraries, by strategy and connections
    """

    gemm_rate: float
    tile_us: float
    accumulate: float
    hidden: float
    call_overhead_us: Mapping[str, float]
    megatron_backward: Mapping[str, float]
    exposures: Mapping[tuple[str, str], Exposure]


FITTED = Constants(
    gemm_rate=0.9913,
    tile_us=1.75,
    accumulate=1.325,
    hidden=0.3187,
    call_overhead_us={"hopper": 12.9, "pipelined": 19.8, "fused": 19.8},
    megatron_backward={"unset": 0.866, "1": 0.325},
    exposures={
        ("te", "unset"): Exposure(gather=0.213, scatter=0.439, column_backward=0.553),
        ("te", "1"): Exposure(gather=0.204, scatter=0.346, column_backward=0.529),
        ("async_tp", "unset"): Exposure(gather=0.201, scatter=0.397, column_backward=0.496),
        ("async_tp", "1"): Exposure(gather=0.209, scatter=1.247, column_backward=0.95),
    },
)
