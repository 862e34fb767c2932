"""One rank of a bench run: every selected case, verified, raced and written down."""

from __future__ import annotations

import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache

import torch

from flux_megatron import settings
from flux_megatron.lab.bench import records
from flux_megatron.lab.bench.backward import AllReducedBackward, Backward
from flux_megatron.lab.bench.candidates import Candidate, host_time_us, in_graphs
from flux_megatron.lab.bench.competitors import Competitor, all_competitors
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.lab.bench.options import BASELINES, Options
from flux_megatron.lab.bench.records import COMPETITOR, LIBRARY, MISSING, OK, OURS, Row, baselines
from flux_megatron.lab.bench.suites import PEERS, Case
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.lab.bench.verify import Verdict, examine
from flux_megatron.tuning.timing import Race, race

WITH_HOST_TIME = ("auto", "serial")
# the experiments that are more than one GEMM, by pattern
KINDS: dict[str, type[Backward]] = {"backward": Backward, "backward_ar": AllReducedBackward}


def measure_all(options: Options, run: Run) -> None:
    """Measure every case; rank 0 appends its rows and prints a line. Stops between two cases when
    the time is up.
    """
    torch.manual_seed(1 + run.group.rank())
    competitors = {competitor: competitor.unavailable() for competitor in all_competitors()}
    for competitor, reason in competitors.items():
        if reason and run.first:
            warnings.warn(f"{competitor.name}: {reason}", stacklevel=2)
    cases = options.cases()
    for number, case in enumerate(cases, start=1):
        if not run.time_left():
            break
        for rows in measure(case, options, run, competitors):
            if run.first:
                for row in rows:
                    run.row("operators", **asdict(row))
                print(f"{number} of {len(cases)}: {line(case, rows)}", flush=True)


def measure(
    case: Case, options: Options, run: Run, competitors: Mapping[Competitor, str | None]
) -> Iterator[list[Row]]:
    """The rows of one case for each condition, one a candidate."""
    device, dtype = run.device, getattr(torch, run.about.dtype)
    own = _own_stream(device) if options.graphs and device.type == "cuda" else None
    with torch.cuda.stream(own):
        experiment = KINDS.get(case.pattern, Forward)(case, run.group, device, dtype)
        every = [*experiment.candidates(), *_of_competitors(experiment, competitors)]
    known = (*BASELINES, *options.candidates)
    chosen = [one for one in every if not options.candidates or one.name in known]
    if options.all_plans and isinstance(experiment, Forward):
        chosen += experiment.all_plans()
    for load in ("", *options.loads) if options.beside else ("",):
        replayed = [*in_graphs(chosen, device)] if options.graphs else []
        with _plans_for(bool(load)), torch.cuda.stream(own):
            rows = _measure(experiment, [*chosen, *replayed], load, options.rounds)
        yield rows


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Where calls are captured: the default stream cannot be, and backward runs on forward's."""
    return torch.cuda.Stream(device)


@contextmanager
def _plans_for(beside: bool) -> Iterator[None]:
    """Let `auto` be what a user gets whose calls run alone, or beside others."""
    before = os.environ.get("FLUX_MEGATRON_BESIDE", "auto")
    os.environ["FLUX_MEGATRON_BESIDE"] = "1" if beside else "0"
    settings.reload()
    try:
        yield
    finally:
        os.environ["FLUX_MEGATRON_BESIDE"] = before
        settings.reload()


def _of_competitors(
    experiment: Forward | Backward, competitors: Mapping[Competitor, str | None]
) -> Iterator[Candidate]:
    for competitor, reason in competitors.items():
        names = PEERS[competitor.name].get(experiment.case.pattern, ())
        if reason:
            yield from (Candidate(name, COMPETITOR, None, reason) for name in names)
            continue
        try:
            calls = competitor.build(experiment) if names else {}
        except Exception as error:  # `examine` reports it to the other ranks
            calls = dict.fromkeys(names, _raise(error))
        yield from (Candidate(name, COMPETITOR, calls[name]) for name in names)


def _raise(error: Exception) -> Callable[[], tuple[torch.Tensor, ...]]:
    def call() -> tuple[torch.Tensor, ...]:
        raise error

    return call


def _measure(
    experiment: Forward | Backward, chosen: list[Candidate], load: str, rounds: int
) -> list[Row]:
    case, group, device = experiment.case, experiment.group, experiment.device
    verdicts = examine(experiment, chosen, group)
    calls = {c.name: c.call for c in chosen if c.call and verdicts[c.name].right}
    beside, collective = bool(load), load or "all_reduce"
    raced = race(
        calls, group=group, device=device, rounds=rounds, beside=beside, collective=collective
    )
    timed = raced.times_us
    with_host = [n for n in WITH_HOST_TIME if n in timed and device.type == "cuda"]
    host_us = {name: host_time_us(calls[name], device) for name in with_host}
    plans = {c.name: json.loads(c.plan()) for c in chosen if c.plan and c.name in timed}
    medians = {name: statistics.median(times) for name, times in timed.items()}
    against, rows = baselines(medians), []
    for one in chosen:
        verdict = verdicts.get(one.name, Verdict("", [], []))
        times = [round(t, 1) for t in timed.get(one.name, [])]
        median = medians.get(one.name)
        E = against.efficiency(median) if against and median is not None else None
        row = Row(
            case.suite, case.pattern, case.op, case.layout, case.M, case.N_local, case.K_local,
            one.name, one.role, *_status(one, verdict, raced),
            errors=[_rounded(error) for error in verdict.errors],
            allowed=[_rounded(error) for error in verdict.allowed],
            times_us=times, median_us=_tenth(median),
            gemm_us=_tenth(against.gemm if against else None),
            serial_us=_tenth(against.serial if against else None),
            efficiency=None if E is None else round(E, 4), host_us=_tenth(host_us.get(one.name)),
            plan=plans.get(one.name), beside=beside, collective=collective,
        )  # fmt: skip
        rows.append(row)
    return rows


def _status(candidate: Candidate, verdict: Verdict, raced: Race) -> tuple[str, str]:
    """And the reason."""
    name = candidate.name
    if candidate.call is None:
        status = MISSING if candidate.role == COMPETITOR else records.UNSUPPORTED
        return status, candidate.reason
    if failure := verdict.failure or raced.failures.get(name):
        return records.FAILED, failure
    if not verdict.right:
        return records.WRONG, f"errors {verdict.errors}, at most {verdict.allowed} allowed"
    outlived, rounds = raced.outlived.get(name), len(raced.times_us[name])
    said = f"the load ended first in {outlived} of {rounds} rounds"
    return OK, said if outlived else ""


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _rounded(error: float) -> float | None:
    """JSON has no infinity: None stands for a result with NaN or infinity in it."""
    return float(f"{error:.3g}") if math.isfinite(error) else None


def line(case: Case, rows: list[Row]) -> str:
    """Microseconds of the baselines, of ours, and of the fastest competitor, with E in brackets;
    then what is to be known of others.
    """
    right = {row.candidate: row for row in rows if row.median_us is not None}
    shown = [right[name] for name in ("gemm", "serial", "auto") if name in right]
    for role in (OURS, COMPETITOR):
        some = [row for row in right.values() if row.role == role and row.candidate != "auto"]
        shown += sorted(some, key=lambda row: row.median_us or 0.0)[:1]
    remarks = [
        f"\n    {row.candidate} {row.status}: {row.reason}" for row in rows
        if (row.status not in (OK, MISSING) and row.role == COMPETITOR)
        or (row.status == OK and row.reason)
    ]  # fmt: skip
    hidden = {row.candidate: f" ({row.efficiency:.2f})" for row in shown
              if row.efficiency is not None and row.role != LIBRARY}  # fmt: skip
    cells = [f"{r.candidate} {r.median_us:.0f}{hidden.get(r.candidate, '')}" for r in shown]
    load = f", beside {rows[0].collective}" * rows[0].beside
    return f"{case}{load}: {', '.join(cells)}{''.join(remarks)}"
