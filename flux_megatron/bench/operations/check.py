"""`flux-megatron bench check` of rows of tables: is ours faster than its unfused baseline?

| table | ours, its fastest form | baseline | times as fast, at least |
| --- | --- | --- | --- |
| gemv_ar | `low_latency` | mm and NCCL | 1.22 for M <= 16; the all-reduce alone: 8 us at most |
| embedding_a2a | `fused` | a lookup and NCCL | 1.20 |
| expert_parallel | the strategies that overlap | NCCL of known splits and a grouped GEMM | 1.20 |
| signalled | every strategy that overlaps | GEMM and NCCL | E >= 0.90 of GEMM+AR for M >= 4096 |

And none slower. A baseline counts as a graph where it is faster so. A case counts by the run that
measured it last; what no row shows is not asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flux_megatron.bench import targets
from flux_megatron.bench.check import MET, MISSED, MISSING, Outcome
from flux_megatron.bench.efficiency import Baselines

Row = Mapping[str, Any]
NOT_SLOWER = 1.0
AR_GEMM_EFFICIENCY, AR_GEMM_ROWS = 0.90, 4096
AR_ALONE_US = 8.0


@dataclass(frozen=True)
class Table:
    """How rows of a table are read: the fields that make a case, the first words of the baseline's
    names, and of the others' that are not ours. `speedup`: of every case but a small one.
    """

    case: tuple[str, ...]
    baseline: str
    others: tuple[str, ...]
    speedup: float

    def ours(self, name: str) -> bool:
        return not name.startswith((self.baseline, *self.others))


TABLES = {
    "gemv_ar": Table(("case", "M"), "mm + all-reduce", ("mm",), 1.22),
    "embedding_a2a": Table(
        ("direction", "batch", "tables", "pooling", "dtype", "hot"), "library", ("lookup",), 1.20
    ),
    "expert_parallel": Table(
        ("model", "operation", "tokens", "skew"), "nccl",
        ("gemm", "a2a", "wgrad", "own", "sequential"), 1.20,
    ),
    "signalled": Table(
        ("pattern", "M", "N", "K"), "serial", ("gemm", "kernel", "portable kernel", "sequential"),
        NOT_SLOWER,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One case of a run: a row of it, and the median of each candidate in microseconds."""

    row: Row
    us: dict[str, float]

    @property
    def table(self) -> Table:
        return TABLES[self.row["table"]]

    def fastest(self, ours: bool) -> tuple[str, float] | None:
        """Our name and time, or the baseline's."""
        table = self.table
        among = {
            name: us
            for name, us in self.us.items()
            if (table.ours(name) if ours else name.startswith(table.baseline))
        }
        return min(among.items(), key=lambda item: item[1], default=None)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={self.row[name]}" for name in self.table.case)
        return f"{self.row['table']} {sizes}"


@dataclass(frozen=True)
class Verdict:
    connections: str
    case: str
    target: str
    outcome: Outcome

    def __str__(self) -> str:
        where = f"connections {self.connections}, {self.case}"
        return f"{self.outcome.verdict:7} {where}: {self.target}: {self.outcome.got}"


def check(rows: Iterable[Row], world_size: int) -> list[Verdict]:
    """A verdict for every target of every case that has rows."""
    return [
        Verdict(measured.row["max_connections"], str(measured), target, outcome)
        for measured in latest(row for row in rows if _counts(row, world_size))
        for target, outcome in _outcomes(measured)
    ]


def latest(rows: Iterable[Row]) -> list[Measured]:
    """The cases, each of the run that measured it last."""
    found: dict[tuple[str, str], Measured] = {}
    for row in rows:
        case = (row["max_connections"], str(Measured(row, {})))
        if case not in found or found[case].row["run"] != row["run"]:
            found[case] = Measured(row, {})
        found[case].us.update(_times(row))
    return [*found.values()]


def _times(row: Row) -> dict[str, float]:
    """Of the candidate, or of all candidates, of a row; none of one that failed."""
    if isinstance(row.get("times_us"), Mapping):
        return {name: statistics.median(times) for name, times in row["times_us"].items()}
    us = row.get("us", row.get("median_us"))
    return {} if us is None else {row["candidate"]: us}


def _counts(row: Row, world_size: int) -> bool:
    on_target = targets.GPU in row["gpu"] and row["nvls"] == "off" and row["scale"] == 1
    return row["table"] in TABLES and on_target and row["world_size"] == world_size


def _outcomes(measured: Measured) -> Iterator[tuple[str, Outcome]]:
    """What is asked of the case, and what its rows show."""
    name, row = measured.row["table"], measured.row
    ours, baseline = measured.fastest(ours=True), measured.fastest(ours=False)
    if ours is None or baseline is None:
        yield f"{name}: never slower", Outcome(MISSING, "no time of ours, or of the baseline")
        return
    speedup = baseline[1] / ours[1]
    got = f"{ours[0]} {ours[1]:.1f} us against {baseline[0]} {baseline[1]:.1f}: {speedup:.3f}"
    yield f"{name}: never slower", _at_least(speedup, NOT_SLOWER, got)
    if name == "gemv_ar" and row["case"] == "all-reduce alone":
        alone = Outcome(MET if ours[1] <= AR_ALONE_US else MISSED, got, ours[1])
        yield f"{name}: at most {AR_ALONE_US} us", alone
    elif measured.table.speedup > NOT_SLOWER and (name != "gemv_ar" or row["M"] <= 16):
        asked = measured.table.speedup
        yield f"{name}: {asked:.2f} times as fast", _at_least(speedup, asked, got)
    if name == "signalled" and row["pattern"] == "gemm_ar" and row["M"] >= AR_GEMM_ROWS:
        efficiency = Baselines(measured.us["gemm"], baseline[1]).efficiency(ours[1])
        text = f"{ours[0]} {efficiency:.3f}" if efficiency is not None else "nothing to hide"
        yield (
            f"gemm_ar: E >= {AR_GEMM_EFFICIENCY:.2f}",
            _at_least(efficiency or 0.0, AR_GEMM_EFFICIENCY, text),
        )


def _at_least(value: float, bound: float, got: str) -> Outcome:
    return Outcome(MET if value >= bound else MISSED, got, value)
