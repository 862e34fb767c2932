"""`flux-megatron bench check`: do the rows meet the targets?

| target | met if |
| --- | --- |
| E | E of `auto`, as its row has it, is at least the bound |
| T / T_gemm | `auto` / `gemm` (dgrad and wgrad alone) is at most the bound |
| never slower | `auto` <= (1 + noise) x its baseline, `serial` or `megatron`, or that as a graph |
| T_gemm / T | the smaller of `gemm` and `ours_gemm`, over `ours_gemm`, is at least the bound |
| ahead | `auto` is below the competitor; a tie is missed |
| host time | the host's time for a call of `auto` is at most the bound |

A name stands for its median time. A competitor that fails on a case, or is wrong there, counts as
slower.

Noise: `serial_again` is `serial` once more, so their medians would be equal without noise. Of all
cases of one run, pattern and kind of target the 95th percentile of |serial_again / serial - 1| is
taken, and no more than `NOISE_MAX` of it.

Targets beside other kernels count rows that were measured beside them, all other targets rows
alone.

A case counts by the run that measured it last, and only if that run was on the targets' machine
with enough rounds. What a run lacks, a competitor included, is `missing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flux_megatron.bench import records, suites, targets
from flux_megatron.bench.efficiency import IN_A_GRAPH, percentile
from flux_megatron.bench.records import Row
from flux_megatron.bench.suites import Case
from flux_megatron.bench.targets import Target

MET, MISSED, MISSING = "met", "missed", "missing"
Group = Mapping[str, Row]  # the rows of one case by candidate
Groups = Mapping[tuple[str, tuple[str, str, str, int]], Group]


class Outcome(NamedTuple):
    """What the rows show for one target: `value` is the number that the bound limits, if any."""

    verdict: str
    got: str
    value: float | None = None


@dataclass(frozen=True)
class Verdict:
    connections: str
    case: Case
    target: str
    outcome: Outcome

    def __str__(self) -> str:
        case = f"{self.case.suite} {self.case.op} M={self.case.M}"
        where = f"connections {self.connections}, {case}"
        return f"{self.outcome.verdict:7} {where}: {self.target}: {self.outcome.got}"


def check(rows: Iterable[Row], world_size: int = targets.WORLD_SIZE) -> list[Verdict]:
    """A verdict for every target of every case, whether there are rows for it or not."""
    counted = [row for row in rows if _counts(row, world_size)]
    alone, beside = records.latest(counted), records.latest(counted, beside=True)
    return [
        Verdict(connections, case, target, outcome)
        for connections in targets.CONNECTIONS
        for suite in suites.MODELS
        for pattern in suites.PATTERNS
        for case in suites.cases(suite, pattern, suites.ALL_M, world_size)
        for target, outcome in _outcomes(connections, case, alone, beside)
    ]


class Judged(Protocol):
    """A verdict on one target, of a layer or of another operation."""

    @property
    def connections(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...


def summary(verdicts: Iterable[Judged]) -> str:
    """How often each target is met, missed and missing, for both values of connections."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for verdict in verdicts:
        key = (verdict.connections, verdict.target)
        counts.setdefault(key, Counter())[verdict.outcome.verdict] += 1
    return "\n".join(
        f"{count[MET]:3} met {count[MISSED]:3} missed {count[MISSING]:3} missing  "
        f"connections {connections}, {target}"
        for (connections, target), count in counts.items()
    )


def _counts(row: Row, world_size: int) -> bool:
    """Whether a row was measured on the machine that the targets speak of, by so many ranks."""
    where = row.provenance
    return (
        targets.GPU in where.gpu
        and where.world_size == world_size
        and where.dtype == targets.DTYPE
        and where.scale == 1
        and where.nvls == "off"
    )


def _outcomes(
    connections: str, case: Case, alone: Groups, beside: Groups
) -> Iterator[tuple[str, Outcome]]:
    for target in targets.targets_of(case.pattern, case.M):
        groups = beside if target.beside else alone
        group = _group_of(case, connections, groups)
        if target.kind == targets.NEVER_SLOWER:
            yield str(target), never_slower(group, case.pattern, noise(target, group, groups))
        else:
            yield str(target), bounded(group, target)
    group = _group_of(case, connections, alone)
    for competitor in targets.COMPETITORS[case.pattern]:
        yield f"{case.pattern}: ahead of {competitor}", ahead(group, competitor)
    if case.pattern in targets.WITH_HOST_TIME:
        yield f"{case.pattern}: host time <= {targets.HOST_US_MAX:.0f} us", host_time(group)


def _group_of(case: Case, connections: str, groups: Groups) -> Group:
    """The rows of a case. Every run of the other patterns times the GEMM alone too, under the same
    names, so no run of the pattern `gemm` is needed.
    """
    patterns = ("gemm", "ag_gemm", "gemm_rs") if case.pattern == "gemm" else (case.pattern,)
    found = (groups.get((connections, (case.suite, p, case.op, case.M))) for p in patterns)
    return next((group for group in found if group), {})


def bounded(group: Group, target: Target) -> Outcome:
    """E, T / T_gemm or T_gemm / T against the target's bound; in the last T_gemm is the fastest
    library's.
    """
    ours = "ours_gemm" if target.kind == targets.GEMM_SHARE else "auto"
    if lacking := _lacking(group, ours, "gemm"):
        return lacking
    row, gemm_us = group[ours], _median_us(group["gemm"])
    if target.kind == targets.EFFICIENCY:
        value = row.efficiency
    elif target.kind == targets.TIMES_GEMM:
        value = _median_us(row) / gemm_us
    else:
        peers = [name for name in targets.GEMM_PEERS if not _lacking(group, name)]
        fastest_us = min([gemm_us, *(_median_us(group[name]) for name in peers)])
        value = min(fastest_us / _median_us(row), 1.0)
    if value is None:
        return Outcome(MISSING, "the collectives cost nothing here: there is no E")
    met = value <= target.bound if target.kind == targets.TIMES_GEMM else value >= target.bound
    return Outcome(MET if met else MISSED, f"{value:.3f}", value)


def never_slower(group: Group, pattern: str, noise: float) -> Outcome:
    """`auto` against the baseline of its pattern, with the run's noise as the only allowance."""
    baseline = targets.BASELINE[pattern]
    if lacking := _lacking(group, "auto", baseline):
        return lacking
    replayed = baseline + IN_A_GRAPH
    if not _lacking(group, replayed) and _median_us(group[replayed]) < _median_us(group[baseline]):
        baseline = replayed
    ratio = _median_us(group["auto"]) / _median_us(group[baseline])
    got = f"{ratio:.3f} of {baseline}, noise {noise:.3f}"
    return Outcome(MET if ratio <= 1 + noise else MISSED, got, ratio)


def noise(target: Target, group: Group, groups: Groups) -> float:
    """What `serial_again` shows in the cases of a target in the run that `group` is of."""
    runs = {row.provenance.run for row in group.values()}
    differences = [
        abs(_median_us(others["serial_again"]) / _median_us(others["serial"]) - 1)
        for (_, (_, pattern, _, M)), others in groups.items()
        if pattern == target.pattern
        and target.M_min <= M <= target.M_max
        and not _lacking(others, "serial", "serial_again")
        and others["serial"].provenance.run in runs
    ]
    return min(percentile(differences, 95), targets.NOISE_MAX) if differences else 0.0


def ahead(group: Group, competitor: str) -> Outcome:
    """`auto` against one competitor; one that failed is not behind."""
    if lacking := _lacking(group, "auto"):
        return lacking
    row = group.get(competitor)
    if row is None or row.status == records.MISSING:
        return Outcome(MISSING, f"no {competitor}")
    if row.status != records.OK:
        return Outcome(MISSING, f"{competitor} {row.status}: {row.reason}")
    auto_us = _median_us(group["auto"])
    ratio = auto_us / _median_us(row)
    got = f"{auto_us:.1f} us against {_median_us(row):.1f}"
    return Outcome(MET if ratio < 1 else MISSED, got, ratio)


def host_time(group: Group) -> Outcome:
    """The host's share of a call of `auto`."""
    if lacking := _lacking(group, "auto"):
        return lacking
    host_us = group["auto"].host_us
    if host_us is None:
        return Outcome(MISSING, "no host time")
    met = host_us <= targets.HOST_US_MAX
    return Outcome(MET if met else MISSED, f"{host_us:.1f} us", host_us)


def _lacking(group: Group, *names: str) -> Outcome | None:
    """Why there is nothing to judge: `missed` if ours ran and failed, else `missing`."""
    for name in names:
        row = group.get(name)
        if row is None:
            return Outcome(MISSING, f"no row of {name}")
        if row.status in (records.WRONG, records.FAILED):
            verdict = MISSED if row.role == records.OURS else MISSING
            return Outcome(verdict, f"{name} {row.status}: {row.reason}")
        if row.status != records.OK:
            return Outcome(MISSING, f"{name} {row.status}: {row.reason}")
        if len(row.times_us) < targets.ROUNDS_MIN:
            rounds = f"{len(row.times_us)} rounds, {targets.ROUNDS_MIN} expected"
            return Outcome(MISSING, f"{name}: {rounds}")
    return None


def _median_us(row: Row) -> float:
    assert row.median_us is not None, "a row that is ok has times"
    return row.median_us
