"""One rank of a bench run: every selected case, verified, raced and written down."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.lab.bench import provenance, records
from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.backward_ar import AllReducedBackward
from flux_megatron.lab.bench.candidates import Call, Candidate, in_graphs
from flux_megatron.lab.bench.competitors import Competitor, all_competitors
from flux_megatron.lab.bench.efficiency import baselines, percentile
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.lab.bench.options import BASELINES, Options
from flux_megatron.lab.bench.records import COMPETITOR, Provenance, Row
from flux_megatron.lab.bench.suites import GEMM_PEERS, Case
from flux_megatron.lab.bench.verify import Verdict, examine
from flux_megatron.tuning.timing import Race, host_time_us, race

WITH_HOST_TIME = ("auto", "serial")
# the experiments that are more than one GEMM, by pattern
KINDS: dict[str, type[Backward]] = {"backward": Backward, "backward_ar": AllReducedBackward}


Show = Callable[[Case, list[Row]], None]


def run(options: Options, group: ProcessGroup, device: torch.device, show: Show) -> None:
    """Measure every case; rank 0 appends its rows and shows them. Stops between two cases when the
    time is up.
    """
    started = time.monotonic()
    torch.manual_seed(1 + group.rank())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    about = provenance.describe(
        device, group.size(), dtype, options.scale, options.nvls, options.commit
    )
    competitors = {competitor: competitor.unavailable() for competitor in all_competitors()}
    for competitor, reason in competitors.items():
        if reason and group.rank() == 0:
            warnings.warn(f"{competitor.name}: {reason}", stacklevel=2)
    for case in options.cases():
        if _time_is_up(options, started, group, device):
            break
        for rows in measure(case, options, group, device, dtype, competitors, about):
            if group.rank() == 0:
                records.append(Path(options.out), rows)
                show(case, rows)


def measure(
    case: Case, options: Options, group: ProcessGroup, device: torch.device, dtype: torch.dtype,
    competitors: Mapping[Competitor, str | None], about: Provenance,
) -> Iterator[list[Row]]:  # fmt: skip
    """The rows of one case for each condition, one a candidate; without clocks on ranks but 0."""
    own = _own_stream(device) if options.graphs and device.type == "cuda" else None
    with torch.cuda.stream(own):
        experiment = KINDS.get(case.pattern, Forward)(case, group, device, dtype)
        chosen = [
            candidate
            for candidate in [*experiment.candidates(), *_of_competitors(experiment, competitors)]
            if not options.candidates or candidate.name in (*BASELINES, *options.candidates)
        ]
    for beside in options.conditions:
        replayed = [*in_graphs(chosen, device)] if options.graphs else []
        with _plans_for(beside), torch.cuda.stream(own):
            rows = _measure(experiment, [*chosen, *replayed], beside, options.rounds, about)
        yield rows


@cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Where calls are captured: the default stream cannot be, and backward runs on forward's."""
    return torch.cuda.Stream(device)


@contextmanager
def _plans_for(beside: bool) -> Iterator[None]:
    """Let `auto` be what a user gets whose calls run alone, or beside others."""
    before = os.environ.get("FLUX_MEGATRON_BESIDE")
    os.environ["FLUX_MEGATRON_BESIDE"] = "1" if beside else "0"
    settings.reload()
    try:
        yield
    finally:
        del os.environ["FLUX_MEGATRON_BESIDE"]
        if before is not None:
            os.environ["FLUX_MEGATRON_BESIDE"] = before
        settings.reload()


def _measure(
    experiment: Forward | Backward, chosen: list[Candidate], beside: bool, rounds: int,
    about: Provenance,
) -> list[Row]:  # fmt: skip
    group, device = experiment.group, experiment.device
    verdicts = examine(experiment, chosen, group)
    calls = {c.name: c.call for c in chosen if c.call and verdicts[c.name].right}
    raced = race(calls, group=group, device=device, rounds=rounds, beside=beside)
    host_us = {
        name: host_time_us(calls[name], device)
        for name in WITH_HOST_TIME
        if name in raced.times_us and device.type == "cuda"
    }
    plans = {c.name: c.plan() for c in chosen if c.plan and c.name in raced.times_us}
    if group.rank() == 0:
        about = provenance.with_clocks(about, device)
    rows = _rows(experiment.case, chosen, verdicts, raced, host_us, plans, about)
    return [replace(row, beside=beside) for row in rows]


def _of_competitors(
    experiment: Forward | Backward, competitors: Mapping[Competitor, str | None]
) -> Iterator[Candidate]:
    for competitor, reason in competitors.items():
        names = competitor.names(experiment.case.pattern)
        if reason:
            yield from (Candidate(name, COMPETITOR, None, reason) for name in names)
            continue
        try:
            calls = competitor.build(experiment) if names else {}
        except Exception as error:  # `examine` reports it to the other ranks
            calls = {name: _raise(error) for name in names}
        for name in names:
            yield Candidate(name, COMPETITOR, calls[name], local=name in GEMM_PEERS)


def _raise(error: Exception) -> Call:
    def call() -> tuple[torch.Tensor, ...]:
        raise error

    return call


def _time_is_up(
    options: Options, started: float, group: ProcessGroup, device: torch.device
) -> bool:
    """On rank 0's clock, the same on every rank."""
    if options.time_limit_s is None:
        return False
    up = torch.tensor([time.monotonic() - started > options.time_limit_s], device=device).int()
    dist.broadcast(up, group=group, group_src=0)
    return bool(up.item())


def _rows(
    case: Case, chosen: list[Candidate], verdicts: Mapping[str, Verdict], raced: Race,
    host_us: Mapping[str, float], plans: Mapping[str, str], about: Provenance,
) -> list[Row]:  # fmt: skip
    medians = {name: statistics.median(times) for name, times in raced.times_us.items()}
    against = baselines(medians)
    rows = []
    for candidate in chosen:
        name = candidate.name
        verdict = verdicts.get(name, Verdict("", [], []))
        status, reason = _status(candidate, verdict, raced)
        times = [round(t, 1) for t in raced.times_us.get(name, [])]
        median = medians.get(name)
        efficiency = against.efficiency(median) if against and median is not None else None
        rows.append(
            Row(
                suite=case.suite,
                pattern=case.pattern,
                op=case.op,
                layout=case.layout,
                M=case.M,
                N_local=case.N_local,
                K_local=case.K_local,
                candidate=name,
                role=candidate.role,
                status=status,
                reason=reason,
                errors=[_rounded(error) for error in verdict.errors],
                allowed=[_rounded(error) for error in verdict.allowed],
                times_us=times,
                median_us=_tenth(median),
                min_us=_tenth(min(times, default=None)),
                p20_us=_tenth(percentile(times, 20)) if times else None,
                p80_us=_tenth(percentile(times, 80)) if times else None,
                gemm_us=_tenth(against.gemm) if against else None,
                serial_us=_tenth(against.serial) if against else None,
                efficiency=None if efficiency is None else round(efficiency, 4),
                host_us=_tenth(host_us.get(name)),
                plan=json.loads(plans[name]) if name in plans else None,
                provenance=about,
            )
        )
    return rows


def _status(candidate: Candidate, verdict: Verdict, raced: Race) -> tuple[str, str]:
    if candidate.call is None:
        status = records.MISSING if candidate.role == COMPETITOR else records.UNSUPPORTED
        return status, candidate.reason
    if verdict.failure:
        return records.FAILED, verdict.failure
    if not verdict.right:
        return records.WRONG, f"errors {verdict.errors}, at most {verdict.allowed} allowed"
    if candidate.name in raced.failures:
        return records.FAILED, raced.failures[candidate.name]
    if outlived := raced.outlived.get(candidate.name):
        rounds = len(raced.times_us[candidate.name])
        return records.OK, f"the all-reduces ended first in {outlived} of {rounds} rounds"
    return records.OK, ""


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _rounded(error: float) -> float | None:
    """JSON has no infinity: None stands for a result with NaN or infinity in it."""
    return float(f"{error:.3g}") if math.isfinite(error) else None
