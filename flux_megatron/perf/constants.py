"""What the cost model cannot derive: the few numbers fitted to measured rows.

`FITTED` is what `calibration.fit` makes of docs/results/h200x4/operators_*.jsonl; a test holds the
two against each other. Nothing here was fitted to a published speedup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Which share of its collectives another library leaves exposed, beside what it costs to cut
    the GEMM: in AG+GEMM, in GEMM+RS, and in the backward of a column layer, which has one of each.
    """

    gather: float
    scatter: float
    column_backward: float


@dataclass(frozen=True)
class Constants:
    """By "connections" is meant CUDA_DEVICE_MAX_CONNECTIONS: "unset", or "1" as Megatron asks for
    before Blackwell.

    gemm_rate: share of a GPU's full-wave rate that the main loop of a library's tile reaches
    tile_us: what every wave of tiles takes beside its main loop
    accumulate, hidden: adding wgrad to an fp32 gradient costs `accumulate` times the traffic,
        divided by 1 + `hidden` x GEMM time / traffic time
    meet_us: what a call of our strategy pays beside transfers, GEMMs and the sum
    megatron_backward: share of a column layer's two collectives that Megatron's backward leaves
        exposed, by connections
    peers: by strategy and connections
    """

    gemm_rate: float
    tile_us: float
    accumulate: float
    hidden: float
    meet_us: Mapping[str, float]
    megatron_backward: Mapping[str, float]
    peers: Mapping[tuple[str, str], Peer]


FITTED = Constants(
    gemm_rate=0.9913,
    tile_us=1.75,
    accumulate=1.325,
    hidden=0.3187,
    meet_us={"hopper": 12.9, "pipelined": 19.8, "fused": 19.8},
    megatron_backward={"unset": 0.866, "1": 0.325},
    peers={
        ("te", "unset"): Peer(gather=0.213, scatter=0.439, column_backward=0.553),
        ("te", "1"): Peer(gather=0.204, scatter=0.346, column_backward=0.529),
        ("async_tp", "unset"): Peer(gather=0.201, scatter=0.397, column_backward=0.496),
        ("async_tp", "1"): Peer(gather=0.209, scatter=1.247, column_backward=0.95),
    },
)
