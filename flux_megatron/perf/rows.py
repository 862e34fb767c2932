"""Measured rows of a transformer layer's linear operations, as `flux-megatron bench` wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flux_megatron.perf.linear import Linear
from flux_megatron.problem import Problem

LAYERS = {"qkv": True, "proj": False, "fc1": True, "fc2": False}  # name: column-parallel
PATTERNS = ("ag_gemm", "gemm_rs", "backward")  # of layers under sequence parallelism
SMALLEST_M = 1024  # below, launches count that no training run notices

# Which candidates of the rows a strategy's forward and backward are.
CANDIDATES = {
    "serial": ("serial", "serial"),
    "megatron": ("serial", "megatron"),
    "auto": ("auto", "auto"),
    "hopper": ("hopper", "hopper"),
    "pipelined": ("pipelined", "pipelined"),
    "te": ("te_ring", "te"),
    "async_tp": ("async_tp", "async_tp"),
}


class Row(NamedTuple):
    """One candidate's median on one operation; M, N_local and K_local are one rank's GEMM."""

    model: str
    connections: str
    world_size: int
    pattern: str
    op: str
    M: int
    N_local: int
    K_local: int
    candidate: str
    median_us: float

    @property
    def backward(self) -> bool:
        return self.pattern == "backward"

    @property
    def problem(self) -> Problem:
        """Of the layer's forward or backward: what `linear.operator_us` takes."""
        column = LAYERS[self.op]
        N, K = self.N_local, self.K_local
        N, K = (N * self.world_size, K) if column else (N, K * self.world_size)
        layer = Linear(column, self.M, N, K, self.world_size)
        return layer.backward if self.backward else layer.forward


def load(paths: Iterable[Path]) -> list[Row]:
    """Rows of training sizes that have a time. `ValueError` names the line that is no row."""
    lines = [
        (line, f"{path.name} line {number}")
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    return [row for line, place in lines if (row := _row(line, place))]


def _row(line: str, place: str) -> Row | None:
    try:
        values = json.loads(line)
        ran = values["status"] == "ok" and values["M"] >= SMALLEST_M
        ran = ran and not values.get("beside")  # constants are of operations alone
        if not ran or values["op"] not in LAYERS or values["pattern"] not in PATTERNS:
            return None
        source = values["provenance"]
        same = {name: values[name] for name in Row._fields if name in values}
        return Row(values["suite"], source["max_connections"], source["world_size"], **same)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error!r}; a row of `flux-megatron bench` expected") from None


def of_layer(rows: Iterable[Row], strategy: str, connections: str) -> list[Row]:
    """What `strategy` measured: forward and backward of four layers, for every model and M."""
    candidates = CANDIDATES[strategy]
    return [
        row
        for row in rows
        if row.connections == connections and row.candidate == candidates[row.backward]
    ]


def cell(rows: Sequence[Row], model: str, M: int) -> tuple[list[Row], list[Row]]:
    """The rows of one model and M, and all others."""
    inside = [row for row in rows if (row.model, row.M) == (model, M)]
    return inside, [row for row in rows if (row.model, row.M) != (model, M)]
